# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The kernels of `draws.py`. Triton is imported with this file, which only a GPU needs.

Tokens are in order by their logits, the largest first, and equal ones by their ids. The law of a
row is a beginning of that order: what top-k, top-p and min-p keep. A float's *key* is an integer
that is in the order of floats.
"""

import triton
import triton.language as tl

# Places of the order that are tried at once.
PIVOTS = tl.constexpr(8)
# Columns of what is asked of a row (`draws.py` has them).
ROW, SIZE, TEMPERATURE, TOP_K = (tl.constexpr(i) for i in range(4))
TOP_P, MIN_P, DISTINCT, DIGITS = (tl.constexpr(i) for i in range(4, 8))
# Columns of a law.
LARGEST, SCALE, TOTAL, CUT, LAST, LEAST = (tl.constexpr(i) for i in range(6))
_COLDEST, _HOTTEST = tl.constexpr(1e-30), tl.constexpr(1e30)
_LOG2_E = tl.constexpr(1.4426950408889634)
_FULL = tl.constexpr(65535.0)
# Added to a float32 below it and subtracted again, it rounds that to an integer, half to even.
_ROUNDER = tl.constexpr(8388608.0)
# Less than any key.
_NO_KEY = tl.constexpr(-(2**31))


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """Of float32 numbers whose last SHIFT bits are zero."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 is 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def number_of(key, SHIFT: tl.constexpr):
    """The number of a key, float32."""
    bits = (key << SHIFT).to(tl.int32)
    bits = tl.where(bits < 0, bits | ((1 << SHIFT) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(x, largest, scale):
    """2 to the power of (x - largest) scale; 0 for what can not be drawn."""
    return tl.where(x > -float("inf"), tl.exp2((x - largest) * scale), 0.0)


@triton.jit
def share_of(x, token, largest, scale, total, cut, last, least):
    """The probability of tokens under a law, from their logits; 0 for those that it has cut."""
    kept = (x > cut) | ((x == cut) & (token <= last))
    mass = mass_of(x, largest, scale)
    return tl.where(kept & (mass >= least), mass / total, 0.0)


@triton.jit
def _weight(x, largest, scale, MASS: tl.constexpr):
    """What tokens add to a sum: their mass; or 1 each, where tokens are counted."""
    found = tl.where(x > -float("inf"), 1.0, 0.0)
    if MASS:
        found = mass_of(x, largest, scale)
    return found


@triton.jit
def _reach(
    values,
    count,
    low,
    high,
    largest,
    scale,
    wanted,
    MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
):
    """The largest key in [low, high) such that the tokens at or above it have at least the wanted
    mass or number; low if there is none.
    """
    lanes, j = tl.arange(0, LANES), 1 + tl.arange(0, PIVOTS)
    low, high = low.to(tl.int64), high.to(tl.int64)
    while high - low > 1:
        step = tl.maximum((high - low) // (PIVOTS + 1), 1)
        pivots = tl.minimum(low + j * step, high)
        above = tl.zeros([LANES, PIVOTS], tl.float32)
        for first in range(0, count, LANES):
            x = tl.load(values + first + lanes, mask=first + lanes < count, other=-float("inf"))
            x = x.to(tl.float32)
            weight = _weight(x, largest, scale, MASS)
            there = key_of(x, SHIFT)[:, None] >= pivots[None, :]
            above += tl.where(there, weight[:, None], 0.0)
        enough = tl.sum(above, 0) >= wanted
        low = tl.maximum(low, tl.max(tl.where(enough, pivots, low), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, pivots), 0))
    return low.to(tl.int32)


@triton.jit
def _above(
    values,
    count,
    key,
    largest,
    scale,
    MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
):
    """The mass, or number, of what is at or above a key."""
    lanes = tl.arange(0, LANES)
    above = tl.zeros([LANES], tl.float32)
    for first in range(0, count, LANES):
        x = tl.load(values + first + lanes, mask=first + lanes < count, other=-float("inf"))
        x = x.to(tl.float32)
        weight = _weight(x, largest, scale, MASS)
        above += tl.where(key_of(x, SHIFT) >= key, weight, 0.0)
    return tl.sum(above, 0)


@triton.jit
def _end(among, ids, many, inside, size, key, wanted, SHIFT: tl.constexpr, LANES: tl.constexpr):
    """Of the tokens that have a key, in the order of their ids: the id of the `wanted`-th, from 1.

    Args:
        among: logits of the whole row; where `inside`, of the listed tokens.
        ids: of the listed tokens.
    """
    lanes, j = tl.arange(0, LANES), 1 + tl.arange(0, PIVOTS)
    low, high = 0 * size - 1, size - 1  # up to low there are too few, up to high enough
    while high - low > 1:
        step = tl.maximum((high - low) // (PIVOTS + 1), 1)
        pivots = tl.minimum(low + j * step, high)
        before = tl.zeros([LANES, PIVOTS], tl.int32)
        for first in range(0, many, LANES):
            on = first + lanes < many
            x = tl.load(among + first + lanes, mask=on, other=-float("inf")).to(tl.float32)
            token = first + lanes
            if inside:
                token = tl.load(ids + first + lanes, mask=on, other=0)
            equal = (key_of(x, SHIFT) == key) & (x > -float("inf"))
            token = tl.where(equal, token, size)
            before += (token[:, None] <= pivots[None, :]).to(tl.int32)
        enough = tl.sum(before, 0) >= wanted
        high = tl.minimum(high, tl.min(tl.where(enough, pivots, high), 0))
        low = tl.maximum(low, tl.max(tl.where(enough, low, pivots), 0))
    return high


@triton.jit
def _largest(whole, size, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of each lane, and of all; whether the row is finite: none is NaN or +inf,
    and not all are -inf.
    """
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        x = tl.load(whole + first + lanes, mask=first + lanes < size, other=-float("inf"))
        x = x.to(tl.float32)
        wrong |= ((x != x) | (x == float("inf"))).to(tl.int32)
        best = tl.where(x > best, x, best)
    largest = tl.max(best, 0)
    best = tl.max(tl.reshape(best, [LANES, BLOCK // LANES]), 1)
    return best, largest, (tl.max(wrong, 0) == 0) & (largest > -float("inf"))


@triton.jit
def _sum(whole, size, bound, largest, scale, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of all, and for each index in a block how many are at or above a bound."""
    lanes = tl.arange(0, BLOCK)
    mass, counts = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, size, BLOCK):
        x = tl.load(whole + first + lanes, mask=first + lanes < size, other=-float("inf"))
        x = x.to(tl.float32)
        mass += mass_of(x, largest, scale)
        counts += ((x > -float("inf")) & (key_of(x, SHIFT) >= bound)).to(tl.int32)
    return tl.sum(mass, 0), counts


@triton.jit
def _list(whole, size, bound, counts, listed, ids, room, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """List what is at or above a bound, as far as there is room, place by place of a block."""
    lanes, to = tl.arange(0, BLOCK), tl.cumsum(counts, 0) - counts
    for first in range(0, size, BLOCK):
        x = tl.load(whole + first + lanes, mask=first + lanes < size, other=-float("inf"))
        wide = x.to(tl.float32)
        there = (wide > -float("inf")) & (key_of(wide, SHIFT) >= bound)
        tl.store(listed + to, x, mask=there & (to < room))
        tl.store(ids + to, first + lanes, mask=there & (to < room))
        to += there.to(tl.int32)


@triton.jit
def _write(
    among,
    ids,
    many,
    inside,
    size,
    low,
    high,
    largest,
    scale,
    limit,
    last,
    least,
    to,
    support,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the likeliest tokens that a law keeps, of all or of those listed; returns how many."""
    lanes, found = tl.arange(0, LANES), 0
    key = _reach(among, many, low, high, largest, scale, support, False, SHIFT, LANES)
    spare = support - _above(among, many, key + 1, largest, scale, False, SHIFT, LANES)
    end = size
    if _above(among, many, key, largest, scale, False, SHIFT, LANES) > support:
        end = _end(among, ids, many, inside, size, key, spare, SHIFT, LANES)
    for first in range(0, many, LANES):
        on = first + lanes < many
        x = tl.load(among + first + lanes, mask=on, other=-float("inf")).to(tl.float32)
        token = first + lanes
        if inside:
            token = tl.load(ids + first + lanes, mask=on, other=0)
        own = key_of(x, SHIFT)
        there = (own > key) | ((own == key) & (token <= end))
        there &= share_of(x, token, largest, scale, 1.0, limit, last, least) > 0
        place = found + tl.cumsum(there.to(tl.int32), 0) - 1
        order = (own.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
        tl.store(to + place, order, mask=there)
        found += tl.sum(there.to(tl.int32), 0)
    return found


@triton.jit
def _nucleus(
    among, many, low, high, largest, scale, wanted, SHIFT: tl.constexpr, LANES: tl.constexpr
):
    """The smallest set of likeliest tokens that has a wanted mass: its last key; how many of the
    tokens with that key belong to it, 0 for all; its mass.
    """
    cut = _reach(among, many, low, high, largest, scale, wanted, True, SHIFT, LANES)
    before = _above(among, many, cut + 1, largest, scale, True, SHIFT, LANES)
    equal = _above(among, many, cut, largest, scale, False, SHIFT, LANES)
    equal -= _above(among, many, cut + 1, largest, scale, False, SHIFT, LANES)
    each = mass_of(number_of(cut, SHIFT), largest, scale)
    keep = tl.minimum(tl.maximum(tl.ceil((wanted - before) / each), 1.0), equal)
    return cut, tl.where(keep < equal, keep, 0.0).to(tl.int32), before + keep * each


@triton.jit
def _kept(whole, size, largest, scale, limit, last, least, BLOCK: tl.constexpr):
    """The mass of what a law keeps."""
    lanes = tl.arange(0, BLOCK)
    kept = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        x = tl.load(whole + first + lanes, mask=first + lanes < size, other=-float("inf"))
        x = x.to(tl.float32)
        kept += share_of(x, first + lanes, largest, scale, 1.0, limit, last, least)
    return tl.sum(kept, 0)


@triton.jit
def _choose(whole, size, listed, count, inside):
    """What is looked through: all, or where that is enough what is listed."""
    among, many = whole, size
    if inside:
        among, many = listed, count
    return among, many


# What is asked varies from round to round: a kernel for each of its widths, or of its alignments,
# would be compiled while texts wait.
@triton.jit(do_not_specialize=["asked_width"], do_not_specialize_on_alignment=["asked"])
def find(
    logits,
    asked,
    laws,
    values,
    places,
    likeliest,
    stride,
    asked_width,
    room,
    support,
    K: tl.constexpr,
    WIDE: tl.constexpr,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The law of a row, and its likeliest tokens, K at most, in no order.

    The cuts of top-k and top-p are searched among the likeliest tokens, which are listed first: all
    that reach a bound. The row is dealt to LANES lanes, and the bound is the WIDE-th largest of the
    lanes' largest logits, so at least WIDE tokens reach it. The whole row is searched instead where
    the list has no room for all of them, or does not reach as far as a cut.
    """
    row, lanes = tl.program_id(0), tl.arange(0, LANES)
    own, law = asked + row * asked_width, laws + row * 6
    whole = logits + tl.load(own + ROW).to(tl.int64) * stride
    size = tl.load(own + SIZE).to(tl.int32)
    temperature = tl.load(own + TEMPERATURE).to(tl.float32)
    greedy = temperature == 0
    warmth = tl.where(greedy, 1.0, tl.minimum(tl.maximum(temperature, _COLDEST), _HOTTEST))
    scale = _LOG2_E / warmth
    top_k = tl.where(greedy, 0, tl.load(own + TOP_K).to(tl.int32))
    top_k = tl.where(top_k < size, top_k, 0)
    top_p = tl.where(greedy, 1.0, tl.load(own + TOP_P).to(tl.float32))
    least = tl.where(greedy, 0.0, tl.load(own + MIN_P).to(tl.float32))
    listed, ids = values + row.to(tl.int64) * room, places + row.to(tl.int64) * room

    best, largest, finite = _largest(whole, size, LANES, BLOCK)
    lowest = key_of(tl.full([], -float("inf"), tl.float32), SHIFT)
    high = key_of(largest, SHIFT) + 1
    listing = finite & ((K > 0) | (top_k > 0) | (top_p < 1))
    bound = high
    if listing:
        tl.store(listed + lanes, best.to(listed.dtype.element_ty))
        tl.debug_barrier()
        # All lanes reach the least of their largest.
        bound = key_of(tl.min(best, 0), SHIFT)
        bound = _reach(listed, LANES, bound, high, largest, scale, WIDE, False, SHIFT, LANES)
        tl.debug_barrier()
    mass, counts = _sum(whole, size, bound, largest, scale, SHIFT, BLOCK)
    count = tl.sum(counts, 0)
    if listing:
        _list(whole, size, bound, counts, listed, ids, room, SHIFT, BLOCK)
        tl.debug_barrier()
    fits = (count > 0) & (count <= room)
    cut, last = lowest, size

    if finite & (top_k > 0):
        inside = fits & (top_k <= count)
        among, many = _choose(whole, size, listed, count, inside)
        low = tl.where(inside, bound, lowest)
        cut = _reach(among, many, low, high, largest, scale, top_k, False, SHIFT, LANES)
        mass = _above(among, many, cut, largest, scale, True, SHIFT, LANES)
    if finite & (top_p < 1):
        wanted, low = top_p * mass, tl.maximum(cut, bound)
        some = _above(listed, tl.where(fits, count, 0), low, largest, scale, True, SHIFT, LANES)
        inside = fits & (some >= wanted)
        among, many = _choose(whole, size, listed, count, inside)
        low = tl.where(inside, low, cut)
        cut, keep, mass = _nucleus(among, many, low, high, largest, scale, wanted, SHIFT, LANES)
        if keep > 0:
            last = _end(among, ids, many, inside, size, cut, keep, SHIFT, LANES)
    if finite & greedy:
        cut, mass = high - 1, 1.0
        last = _end(whole, ids, size, size < 0, size, cut, 1, SHIFT, LANES)
    limit = number_of(cut, SHIFT)
    if finite & (least > 0):
        mass = _kept(whole, size, largest, scale, limit, last, least, BLOCK)

    tl.store(law + LARGEST, largest.to(tl.float64))
    tl.store(law + SCALE, scale.to(tl.float64))
    tl.store(law + TOTAL, tl.where(finite, mass, float("nan")).to(tl.float64))
    tl.store(law + CUT, limit.to(tl.float64))
    tl.store(law + LAST, last.to(tl.float64))
    tl.store(law + LEAST, least.to(tl.float64))

    if K > 0:
        found, k = 0, tl.arange(0, K)
        to = likeliest + row.to(tl.int64) * K
        if finite:
            among, many = _choose(whole, size, listed, count, fits)
            found = _write(
                among,
                ids,
                many,
                fits,
                size,
                bound,
                high,
                largest,
                scale,
                limit,
                last,
                least,
                to,
                support,
                SHIFT,
                LANES,
            )
        tl.store(to + k, (tl.full([K], _NO_KEY, tl.int64) << 32) + k, mask=k >= found)


@triton.jit(
    do_not_specialize=["asked_width", "taken_width", "siblings"],
    do_not_specialize_on_alignment=["asked", "taken", "drawn"],
)
def pick(
    likeliest,
    laws,
    asked,
    taken,
    drawn,
    mass,
    asked_width,
    taken_width,
    siblings,
    K: tl.constexpr,
    SHIFT: tl.constexpr,
    PART: tl.constexpr,
):
    """Put a row's likeliest tokens in order, round them to weights, and draw siblings from them."""
    row, k = tl.program_id(0), tl.arange(0, K)
    order = likeliest + row.to(tl.int64) * K
    mine = tl.load(order + k)
    rank = tl.zeros([K], tl.int32)
    for first in range(0, K, PART):
        others = tl.load(order + first + tl.arange(0, PART))
        rank += tl.sum((others[None, :] > mine[:, None]).to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(order + rank, mine)
    tl.debug_barrier()
    mine = tl.load(order + k)
    there = (mine >> 32) > _NO_KEY
    token = tl.where(there, 0x7FFFFFFF - mine.to(tl.int32), 0)
    law = laws + row * 6
    largest = tl.load(law + LARGEST).to(tl.float32)
    scale = tl.load(law + SCALE).to(tl.float32)
    total = tl.load(law + TOTAL).to(tl.float32)
    e = mass_of(number_of(mine >> 32, SHIFT), largest, scale)
    p = tl.where(there, e / total, 0.0)
    before = tl.cumsum(p, 0) - p
    weight = ((e * _FULL + _ROUNDER) - _ROUNDER).to(tl.int64)
    # The first is kept, whatever the rounding; nothing of a row that is not finite.
    weight = tl.where(there & ((before < mass) | ((k == 0) & (p > 0))), weight, 0)

    own = asked + row * asked_width
    to = drawn + row.to(tl.int64) * (siblings + 2 * K)
    tl.store(to + siblings + k, token)
    tl.store(to + siblings + K + k, weight)
    distinct = tl.load(own + DISTINCT) > 0
    left = weight
    instead = tl.full([], -1, tl.int64)
    for i in range(taken_width):
        gone = tl.load(taken + row * taken_width + i)
        if i == 0:
            instead = gone
        left = tl.where(token == gone, 0, left)
    for i in range(siblings):
        sums = tl.cumsum(left, 0)
        most = tl.sum(left, 0)
        low = tl.load(own + DIGITS + 2 * i).to(tl.int64)
        high = tl.load(own + DIGITS + 2 * i + 1).to(tl.int64)
        # floor(bits * most / 2**64), digit by digit.
        point = (((low * most) >> 32) + high * most) >> 32
        place = tl.minimum(tl.sum((sums <= point).to(tl.int32), 0), K - 1)
        found = tl.sum(tl.where(k == place, token, 0), 0)
        found = tl.where((most > 0) | (instead < 0), found, instead)
        if i == 0:
            instead = tl.where(instead < 0, found, instead)
        tl.store(to + i, found)
        left = tl.where(token == tl.where(distinct, found, -1), 0, left)
