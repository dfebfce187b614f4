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
LARGEST, WARMTH, TOTAL, CUT, LAST, LEAST = (tl.constexpr(i) for i in range(6))
_COLDEST, _HOTTEST = tl.constexpr(1e-30), tl.constexpr(1e30)
_FULL = tl.constexpr(65535.0)
# What rounds a float32 below it to an integer, half to even, when it is added and taken away.
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
def mass_of(x, largest, warmth):
    """exp((x - largest) / warmth); 0 for what can not be drawn."""
    return tl.where(x > -float("inf"), tl.exp((x - largest) / warmth), 0.0)


@triton.jit
def share_of(x, token, largest, warmth, total, cut, last, least):
    """The probability of tokens under a law, from their logits; 0 for those that it has cut."""
    kept = (x > cut) | ((x == cut) & (token <= last))
    mass = mass_of(x, largest, warmth)
    return tl.where(kept & (mass >= least), mass / total, 0.0)


@triton.jit
def _weight(x, largest, warmth, MASS: tl.constexpr):
    """Of tokens, their mass; or 1, for their number."""
    found = tl.where(x > -float("inf"), 1.0, 0.0)
    if MASS:
        found = mass_of(x, largest, warmth)
    return found


@triton.jit
def _reach(
    values,
    count,
    low,
    high,
    largest,
    warmth,
    wanted,
    MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
):
    """The largest key, from low up to below high, such that what is at or above it has the wanted
    mass or number; low if none has.
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
            weight = _weight(x, largest, warmth, MASS)
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
    warmth,
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
        weight = _weight(x, largest, warmth, MASS)
        above += tl.where(key_of(x, SHIFT) >= key, weight, 0.0)
    return tl.sum(above, 0)


@triton.jit
def _equal(values, size, key, wanted, SHIFT: tl.constexpr, LANES: tl.constexpr):
    """The id of the wanted one, from 1, of the tokens of a key."""
    lanes = tl.arange(0, LANES)
    found, passed = size, 0
    for first in range(0, size, LANES):
        x = tl.load(values + first + lanes, mask=first + lanes < size, other=-float("inf"))
        x = x.to(tl.float32)
        equal = ((key_of(x, SHIFT) == key) & (x > -float("inf"))).to(tl.int32)
        place = passed + tl.cumsum(equal, 0)
        found = tl.minimum(
            found, tl.min(tl.where((equal > 0) & (place == wanted), first + lanes, size), 0)
        )
        passed += tl.sum(equal, 0)
    return found


@triton.jit
def _sum(whole, size, warmth, LANES: tl.constexpr):
    """The largest logit of each lane, the largest of all, the mass of all, and whether the row is
    finite: one logit at least, and none that is no number or infinite.
    """
    lanes = tl.arange(0, LANES)
    best = tl.full([LANES], -float("inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    wrong = tl.zeros([LANES], tl.int32)
    for first in range(0, size, LANES):
        x = tl.load(whole + first + lanes, mask=first + lanes < size, other=-float("inf"))
        x = x.to(tl.float32)
        wrong |= ((x != x) | (x == float("inf"))).to(tl.int32)
        more = tl.where(x > best, x, best)
        before = tl.where(best > -float("inf"), total * tl.exp((best - more) / warmth), 0.0)
        total = before + mass_of(x, more, warmth)
        best = more
    largest = tl.max(best, 0)
    mass = tl.sum(total * mass_of(best, largest, warmth), 0)
    return best, largest, mass, (tl.max(wrong, 0) == 0) & (largest > -float("inf"))


@triton.jit
def _list(whole, size, bound, listed, ids, room, SHIFT: tl.constexpr, LANES: tl.constexpr):
    """List what is at or above a bound by the ids, as far as there is room; returns how many."""
    lanes, count = tl.arange(0, LANES), 0
    for first in range(0, size, LANES):
        x = tl.load(whole + first + lanes, mask=first + lanes < size, other=-float("inf"))
        wide = x.to(tl.float32)
        there = (wide > -float("inf")) & (key_of(wide, SHIFT) >= bound)
        place = count + tl.cumsum(there.to(tl.int32), 0) - 1
        tl.store(listed + place, x, mask=there & (place < room))
        tl.store(ids + place, first + lanes, mask=there & (place < room))
        count += tl.sum(there.to(tl.int32), 0)
    return count


@triton.jit
def _write(
    among,
    ids,
    many,
    fits,
    lowest,
    high,
    largest,
    warmth,
    limit,
    last,
    least,
    to,
    support,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the likeliest tokens that a law keeps, of all or of those listed; returns how many."""
    lanes, found, passed = tl.arange(0, LANES), 0, 0.0
    end = _reach(among, many, lowest, high, largest, warmth, support, False, SHIFT, LANES)
    spare = support - _above(among, many, end + 1, largest, warmth, False, SHIFT, LANES)
    for first in range(0, many, LANES):
        on = first + lanes < many
        x = tl.load(among + first + lanes, mask=on, other=-float("inf")).to(tl.float32)
        token = first + lanes
        if fits:
            token = tl.load(ids + first + lanes, mask=on, other=0)
        key = key_of(x, SHIFT)
        equal = tl.where((key == end) & (x > -float("inf")), 1.0, 0.0)
        there = (key > end) | ((equal > 0) & (passed + tl.cumsum(equal, 0) <= spare))
        there &= share_of(x, token, largest, warmth, 1.0, limit, last, least) > 0
        place = found + tl.cumsum(there.to(tl.int32), 0) - 1
        order = (key.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)
        tl.store(to + place, order, mask=there)
        found += tl.sum(there.to(tl.int32), 0)
        passed += tl.sum(equal, 0)
    return found


@triton.jit
def _nucleus(
    among,
    many,
    whole,
    size,
    cut,
    high,
    largest,
    warmth,
    wanted,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Where the smallest set of likeliest tokens of a wanted mass ends: its last key, the last id
    of that key, and its mass.
    """
    last = size
    cut = _reach(among, many, cut, high, largest, warmth, wanted, True, SHIFT, LANES)
    before = _above(among, many, cut + 1, largest, warmth, True, SHIFT, LANES)
    equal = _above(among, many, cut, largest, warmth, False, SHIFT, LANES)
    equal -= _above(among, many, cut + 1, largest, warmth, False, SHIFT, LANES)
    each = mass_of(number_of(cut, SHIFT), largest, warmth)
    keep = tl.minimum(tl.maximum(tl.ceil((wanted - before) / each), 1.0), equal)
    if keep < equal:
        last = _equal(whole, size, cut, keep.to(tl.int32), SHIFT, LANES)
    return cut, last, before + keep * each


@triton.jit
def _kept(whole, size, largest, warmth, limit, last, least, LANES: tl.constexpr):
    """The mass of what a law keeps."""
    lanes = tl.arange(0, LANES)
    kept = tl.zeros([LANES], tl.float32)
    for first in range(0, size, LANES):
        x = tl.load(whole + first + lanes, mask=first + lanes < size, other=-float("inf"))
        x = x.to(tl.float32)
        kept += share_of(x, first + lanes, largest, warmth, 1.0, limit, last, least)
    return tl.sum(kept, 0)


@triton.jit(do_not_specialize=["asked_width"])
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
):
    """The law of a row, and its likeliest tokens, K at most, in no order.

    What top-k and top-p cut is looked for among some of the row's likeliest tokens, which are
    listed: the WIDE largest at least, and all that are equal to the last of them. In the whole row
    where they are too many for the room, or not enough. Of LANES lanes that a row is dealt to, the
    WIDE-th largest of their largest is a bound that WIDE tokens reach.
    """
    row, lanes = tl.program_id(0), tl.arange(0, LANES)
    own, law = asked + row * asked_width, laws + row * 6
    whole = logits + tl.load(own + ROW).to(tl.int64) * stride
    size = tl.load(own + SIZE).to(tl.int32)
    temperature = tl.load(own + TEMPERATURE).to(tl.float32)
    greedy = temperature == 0
    warmth = tl.where(greedy, 1.0, tl.minimum(tl.maximum(temperature, _COLDEST), _HOTTEST))
    top_k = tl.where(greedy, 0, tl.load(own + TOP_K).to(tl.int32))
    top_k = tl.where(top_k < size, top_k, 0)
    top_p = tl.where(greedy, 1.0, tl.load(own + TOP_P).to(tl.float32))
    least = tl.where(greedy, 0.0, tl.load(own + MIN_P).to(tl.float32))
    listed, ids = values + row.to(tl.int64) * room, places + row.to(tl.int64) * room

    best, largest, mass, finite = _sum(whole, size, warmth, LANES)
    lowest = key_of(tl.full([], -float("inf"), tl.float32), SHIFT)
    cut, bound, last, count = lowest, lowest, size, 0
    high = key_of(largest, SHIFT) + 1
    if finite & ((K > 0) | (top_k > 0) | (top_p < 1)):
        tl.store(listed + lanes, best.to(listed.dtype.element_ty))
        tl.debug_barrier()
        bound = _reach(listed, LANES, lowest, high, largest, warmth, WIDE, False, SHIFT, LANES)
        tl.debug_barrier()
        count = _list(whole, size, bound, listed, ids, room, SHIFT, LANES)
        tl.debug_barrier()
    fits = (count > 0) & (count <= room)

    if finite & (top_k > 0):
        among, many = whole, size
        if fits & (top_k <= count):
            among, many = listed, count
        cut = _reach(among, many, lowest, high, largest, warmth, top_k, False, SHIFT, LANES)
        mass = _above(among, many, cut, largest, warmth, True, SHIFT, LANES)
    if finite & (top_p < 1):
        wanted = top_p * mass
        among, many = whole, size
        if fits:
            bounded = tl.maximum(cut, bound)
            if _above(listed, count, bounded, largest, warmth, True, SHIFT, LANES) >= wanted:
                among, many = listed, count
        cut, last, mass = _nucleus(
            among, many, whole, size, cut, high, largest, warmth, wanted, SHIFT, LANES
        )
    if finite & greedy:
        cut, mass = high - 1, 1.0
        last = _equal(whole, size, cut, 1, SHIFT, LANES)
    limit = number_of(cut, SHIFT)
    if finite & (least > 0):
        mass = _kept(whole, size, largest, warmth, limit, last, least, LANES)

    tl.store(law + LARGEST, largest.to(tl.float64))
    tl.store(law + WARMTH, warmth.to(tl.float64))
    tl.store(law + TOTAL, tl.where(finite, mass, float("nan")).to(tl.float64))
    tl.store(law + CUT, limit.to(tl.float64))
    tl.store(law + LAST, last.to(tl.float64))
    tl.store(law + LEAST, least.to(tl.float64))

    if K > 0:
        found, k = 0, tl.arange(0, K)
        to = likeliest + row.to(tl.int64) * K
        if finite:
            among, many = whole, size
            if fits:
                among, many = listed, count
            found = _write(
                among,
                ids,
                many,
                fits,
                lowest,
                high,
                largest,
                warmth,
                limit,
                last,
                least,
                to,
                support,
                SHIFT,
                LANES,
            )
        tl.store(to + k, (tl.full([K], _NO_KEY, tl.int64) << 32) + k, mask=k >= found)


@triton.jit(do_not_specialize=["asked_width", "taken_width"])
def pick(
    likeliest,
    laws,
    asked,
    taken,
    drawn,
    mass,
    asked_width,
    taken_width,
    SIBLINGS: tl.constexpr,
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
    warmth = tl.load(law + WARMTH).to(tl.float32)
    total = tl.load(law + TOTAL).to(tl.float32)
    e = mass_of(number_of(mine >> 32, SHIFT), largest, warmth)
    p = tl.where(there, e / total, 0.0)
    before = tl.cumsum(p, 0) - p
    weight = ((e * _FULL + _ROUNDER) - _ROUNDER).to(tl.int64)
    # The first is kept, whatever the rounding; nothing of a row that is not finite.
    weight = tl.where(there & ((before < mass) | ((k == 0) & (p > 0))), weight, 0)

    own = asked + row * asked_width
    to = drawn + row.to(tl.int64) * (SIBLINGS + 2 * K)
    tl.store(to + SIBLINGS + k, token)
    tl.store(to + SIBLINGS + K + k, weight)
    distinct = tl.load(own + DISTINCT) > 0
    left = weight
    instead = tl.full([], -1, tl.int64)
    for i in range(taken_width):
        gone = tl.load(taken + row * taken_width + i)
        if i == 0:
            instead = gone
        left = tl.where(token == gone, 0, left)
    for i in range(SIBLINGS):
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
