# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The kernels of `verdicts.py`. Triton is imported with this file, which only a GPU needs.

When children of a place are rejected, what is left of its law is held as a probability for each of
the few tokens in the children's rows, and one factor for the target's probabilities of all others.
"""

import triton
import triton.language as tl

from tandem.kernels.triton_draws import (
    CUT,
    LARGEST,
    LAST,
    LEAST,
    SCALE,
    TOTAL,
    share_of,
)

# Columns of what is asked of a text (`verdicts.py` has them).
FIRST, NODES, DISTINCT, UNIFORMS = (tl.constexpr(i) for i in range(4))
_MAX_RATIO = tl.constexpr(1e18)  # as in `ratios.py`
_NEVER = tl.constexpr(1 << 30)


@triton.jit
def _share(logits, law, token, there):
    """The target's probability of tokens."""
    x = tl.load(logits + token, mask=there, other=-float("inf")).to(tl.float32)
    return share_of(
        x,
        token,
        tl.load(law + LARGEST).to(tl.float32),
        tl.load(law + SCALE).to(tl.float32),
        tl.load(law + TOTAL).to(tl.float32),
        tl.load(law + CUT).to(tl.float32),
        tl.load(law + LAST),
        tl.load(law + LEAST).to(tl.float32),
    )


@triton.jit
def _judge(
    place,
    count,
    tokens,
    parents,
    row_of,
    chances,
    after,
    overlaps,
    distinct,
    rows,
    width,
    siblings,
    logits,
    law,
    size,
    K: tl.constexpr,
    JOINT: tl.constexpr,
):
    """Judge the children of a place, one after the other, each against what the ones before it left
    of the place's law.

    Returns:
        The tokens of the children's row, and which of its entries count; what is left of these, and
        the share that is left of all others; each node's chance before its children are judged, and
        after; the overlaps; the number of nodes, which end before one whose row has no weight.
    """
    k = tl.arange(0, K)
    child = (parents == place) & (k < count)
    one = tl.min(tl.where(child, k, K), 0)
    row = tl.sum(tl.where(k == one, row_of, 0), 0)
    sampled = (one < K) & (row >= 0)
    entries = rows + row.to(tl.int64) * width + siblings
    ids = tl.load(entries + k, mask=k < tl.where(sampled, K, 0), other=0).to(tl.int32)
    weights = tl.load(entries + K + k, mask=k < tl.where(sampled, K, 0), other=0)
    whole = tl.sum(weights, 0)
    if sampled & (whole == 0):
        count = one
    # A certain child's distribution has its own token alone.
    ids = tl.where(sampled, ids, tokens)
    there = tl.where(sampled, weights, child.to(tl.int64)) > 0
    p = _share(logits, law, ids, there & (ids < size))
    others = tl.maximum(1.0 - tl.sum(p, 0), 0.0)
    chance = tl.where(place == 0, 1.0, tl.sum(tl.where(k == place - 1, chances, 0.0), 0))
    full = weights.to(tl.float32) / tl.maximum(whole, 1).to(tl.float32)
    shared = tl.sum(tl.where(there, tl.minimum(p, full), 0.0), 0)
    left, share = p, 1.0 + 0.0 * chance
    while one < K:
        token = tl.sum(tl.where(k == one, tokens, 0), 0)
        own = there & (ids == token)
        rest = tl.maximum(tl.sum(weights, 0), 1).to(tl.float32)
        q = tl.where(sampled, weights.to(tl.float32) / rest, own.to(tl.float32))
        p_own = tl.sum(tl.where(own, left, 0.0), 0)
        q_own = tl.sum(tl.where(own, q, 0.0), 0)
        ratio = tl.minimum(p_own / tl.maximum(q_own, 1e-30), _MAX_RATIO)
        ratio = tl.where(q_own == 0, tl.where(p_own == 0, 1.0, _MAX_RATIO), ratio)
        part = 1.0 + 0.0 * chance
        if JOINT:
            part = chance
        came = tl.minimum(part * ratio, 1.0)
        chances = tl.where(k == one, came, chances)
        after = tl.where(k == one, came, after)
        alone = tl.minimum(tl.sum(tl.where(own, p, 0.0), 0), 1.0)
        overlaps = tl.where(k == one, tl.where(sampled, shared, alone), overlaps)
        inside = tl.where(there, tl.maximum(part * left - q, 0.0), 0.0)
        mass = tl.sum(inside, 0) + part * share * others
        some = tl.maximum(mass, 1e-30)
        left = tl.where(mass > 0, inside / some, p)
        share = tl.where(mass > 0, part * share / some, 1.0)
        if JOINT:
            rejected = mass + (1.0 - part)
            chance = tl.where(rejected <= 0, 1.0, mass / rejected)
        weights = tl.where(own & (distinct > 0), 0, weights)
        one = tl.min(tl.where(child & (k > one), k, K), 0)
    if JOINT:
        after = tl.where(k == place - 1, chance, after)
    return ids, there, left, share, chances, after, overlaps, count


# As in `triton_draws.py`.
@triton.jit(
    do_not_specialize=["asked_width", "width", "most", "siblings", "size"],
    do_not_specialize_on_alignment=["asked", "law_rows", "rows", "numbers", "shares"],
)
def judge(
    logits,
    laws,
    law_rows,
    asked,
    rows,
    numbers,
    left_of,
    shares,
    stride,
    asked_width,
    law_width,
    width,
    most,
    siblings,
    size,
    K: tl.constexpr,
    JOINT: tl.constexpr,
):
    """Decide a text's draft, and write what the token after it is drawn from."""
    text, k = tl.program_id(0), tl.arange(0, K)
    own = asked + text * asked_width
    first = tl.load(own + FIRST).to(tl.int32)
    count = tl.load(own + NODES).to(tl.int32)
    distinct = tl.load(own + DISTINCT).to(tl.int32)
    on = k < count
    nodes = own + UNIFORMS + most + 1
    uniforms = tl.load(own + UNIFORMS + k, mask=on, other=1.0)
    parents = tl.load(nodes + k, mask=on, other=-1).to(tl.int32)
    order = tl.load(nodes + most + k, mask=on, other=0).to(tl.int32)
    row_of = tl.load(nodes + 2 * most + k, mask=on, other=-1).to(tl.int32)
    tokens = tl.load(nodes + 3 * most + k, mask=on, other=-1).to(tl.int32)
    # A token of a chain on the device is -1 - r: the r-th draw from its row.
    drawn = rows + row_of.to(tl.int64) * width - 1 - tokens
    tokens = tl.where(tokens < 0, tl.load(drawn, mask=on & (tokens < 0), other=0), tokens)
    tokens = tokens.to(tl.int32)
    chances = tl.zeros([K], tl.float32)
    after, overlaps = chances, chances
    check = tl.full([], 0.0, tl.float32)
    for place in range(count + 1):
        law = laws + (first + place) * 6
        row = tl.load(law_rows + (first + place) * law_width).to(tl.int64)
        check += tl.load(law + TOTAL).to(tl.float32)
        _, _, _, _, chances, after, overlaps, count = _judge(
            place,
            count,
            tokens,
            parents,
            row_of,
            chances,
            after,
            overlaps,
            distinct,
            rows,
            width,
            siblings,
            logits + row * stride,
            law,
            size,
            K,
            JOINT,
        )
    passed = (k < count) & (uniforms < after.to(tl.float64))
    if JOINT:
        # The first from the leaves on.
        when = tl.min(tl.where(passed, order, _NEVER), 0)
        place = tl.sum(tl.where(passed & (order == when), k + 1, 0), 0)
    else:
        # From the root on the first of the children, until none passed.
        node = tl.min(tl.where(passed & (parents == 0), k, K), 0)
        place = 0 * node
        while node < K:
            place = node + 1
            node = tl.min(tl.where(passed & (parents == place), k, K), 0)
    law = laws + (first + place) * 6
    row = tl.load(law_rows + (first + place) * law_width).to(tl.int64)
    ids, there, left, share, _, _, _, _ = _judge(
        place,
        count,
        tokens,
        parents,
        row_of,
        chances,
        after,
        overlaps,
        distinct,
        rows,
        width,
        siblings,
        logits + row * stride,
        law,
        size,
        K,
        JOINT,
    )
    tl.store(left_of + text.to(tl.int64) * size + ids, left, mask=there & (ids < size))
    tl.store(shares + text, share)
    out = numbers + text * (3 + most)
    tl.store(out, place.to(tl.float64))
    tl.store(out + 2, check.to(tl.float64))
    tl.store(out + 3 + k, overlaps.to(tl.float64), mask=k < most)


@triton.jit
def _weights(left_of, logits, law, share, first, lanes, size):
    """What tokens are drawn with, float64."""
    token = first + lanes
    there = token < size
    left = tl.load(left_of + token, mask=there, other=0.0)
    p = _share(logits, law, token, there)
    return tl.where(left >= 0, left, share * p).to(tl.float64)


@triton.jit(
    do_not_specialize=["asked_width", "most", "size"],
    do_not_specialize_on_alignment=["asked", "law_rows", "numbers", "shares"],
)
def follow(
    logits,
    laws,
    law_rows,
    asked,
    numbers,
    left_of,
    shares,
    stride,
    asked_width,
    law_width,
    most,
    size,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Draw the token after a text's place, by inverse CDF over the ids; none of weight 0."""
    text, lanes, parts = tl.program_id(0), tl.arange(0, LANES), tl.arange(0, PARTS)
    own, out = asked + text * asked_width, numbers + text * (3 + most)
    at = tl.load(own + FIRST).to(tl.int32) + tl.load(out).to(tl.int32)
    law = laws + at * 6
    x = logits + tl.load(law_rows + at * law_width).to(tl.int64) * stride
    left, share = left_of + text.to(tl.int64) * size, tl.load(shares + text)
    sums = tl.zeros([PARTS], tl.float64)
    for part in range(tl.cdiv(size, LANES)):
        weights = _weights(left, x, law, share, part * LANES, lanes, size)
        sums = tl.where(parts == part, tl.sum(weights, 0), sums)
    point = tl.load(own + UNIFORMS + most) * tl.sum(sums, 0)
    # Rounding may leave no sum above the point: then the last one that has some weight.
    hit = tl.min(tl.where((sums > 0) & (tl.cumsum(sums, 0) > point), parts, PARTS), 0)
    last = tl.max(tl.where(sums > 0, parts, 0), 0)
    part = tl.minimum(hit, last)
    before = tl.sum(tl.where(parts < part, sums, 0.0), 0)
    weights = _weights(left, x, law, share, part * LANES, lanes, size)
    reached = before + tl.cumsum(weights, 0)
    hit = tl.min(tl.where((weights > 0) & (reached > point), lanes, LANES), 0)
    last = tl.max(tl.where(weights > 0, lanes, 0), 0)
    tl.store(out + 1, (part * LANES + tl.minimum(hit, last)).to(tl.float64))
