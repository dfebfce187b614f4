"""Verdicts of `recursive.py`, `traversal.py`, `spectr.py` and `gbv.py` on a CPU, by one kernel call
per draft.

Like `chains.py`, with which no compiled code is shared (see `greedy_block.py`). Each kernel follows
its rule's file in float32, place by place instead of by depth and rank; only the order of summation
differs. What depends on sums closely is float64: the factors of `spectr.py`, and the masses of
`gbv.py`. A place's law has one buffer, a row of q another, which is zeros before and after.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import boolean, float32, float64, int64, uint16, uint32, void

from tandem.speculation.kernel import kernel, readonly

# As in `ratios.py`.
_MAX_RATIO = np.float32(1e18)
_ONE, _NOTHING = np.float32(1), np.float32(0)
# As in `spectr.py`.
_HALVINGS, _MARGIN = 30, 1 + 64 * 2.0**-23

# decide(p, tokens, parents, row_of, sizes, ids, weights, distinct, uniforms, law, row, out):
#   p [R, V] float32, a row for the root and one for each node that is no twin; the draft: tokens,
#   parents, row_of [N] int64, sizes [rows] int64, ids [E] uint32, weights [E] uint16; uniforms
#   [N+1] float64 as in `Verifier.verify`; law, row [V] float32, row of zeros; out [3 + N] float64:
#   place, next token, a number that is finite iff all rows are, overlaps.
FusedTreeVerdict = Callable[..., None]


@kernel()
def _layout(tokens: Any, parents: Any) -> Any:
    """Each node's home (see `TreeBatch`), and each place's row of p."""
    count = len(tokens)
    homes, rows = np.arange(1, count + 1), np.zeros(count + 1, np.int64)
    computed = 1
    for node in range(count):
        for earlier in range(node):
            if parents[earlier] == parents[node] and tokens[earlier] == tokens[node]:
                homes[node] = earlier + 1
                break
        if homes[node] == node + 1:
            rows[node + 1] = computed
            computed += 1
        else:
            rows[node + 1] = rows[homes[node]]
    return homes, rows


@kernel()
def _from_leaves(parents: Any) -> Any:
    """The nodes in an order in which children come before their parents."""
    count = len(parents)
    below, begin = np.ones(count + 1, np.int64), np.zeros(count + 1, np.int64)
    for node in range(count - 1, -1, -1):
        below[parents[node]] += below[node + 1]
    order = np.zeros(count, np.int64)
    for node in range(count):
        begin[node + 1] = begin[parents[node]]
        begin[parents[node]] += below[node + 1]
        order[begin[parents[node]] - 1] = node
    return order


@kernel()
def _ends(sizes: Any) -> Any:
    ends = np.zeros(len(sizes) + 1, np.int64)
    for row in range(len(sizes)):
        ends[row + 1] = ends[row] + sizes[row]
    return ends


@kernel()
def _write(row: Any, node: Any, draft: Any) -> None:
    """Write a node's distribution into zeros; if `distinct`, without earlier siblings' tokens."""
    tokens, parents, row_of, ends, ids, weights, distinct = draft
    first, end, total, gone = ends[row_of[node]], ends[row_of[node] + 1], 0, 0
    for k in range(first, end):
        total += weights[k]
    for k in range(first, end):
        row[ids[k]] = float32(weights[k] / float64(total))
    if first == end:  # certain
        row[tokens[node]] = _ONE
    if not distinct:
        return
    for earlier in range(node):
        if parents[earlier] == parents[node]:
            row[tokens[earlier]] = _NOTHING
    for k in range(first, end):
        if row[ids[k]] == _NOTHING:
            gone += weights[k]
    if gone:
        left = max(float32((total - gone) / float64(total)), float32(1e-30))
        for k in range(first, end):
            row[ids[k]] /= left


@kernel()
def _clear(row: Any, node: Any, draft: Any) -> None:
    tokens, _, row_of, ends, ids, _, _ = draft
    row[tokens[node]] = _NOTHING
    for k in range(ends[row_of[node]], ends[row_of[node] + 1]):
        row[ids[k]] = _NOTHING


@kernel(any_order=True)
def _take(law: Any, row: Any, chance: Any) -> Any:
    """Replace law by (chance law - row)+; returns its mass."""
    mass = _NOTHING
    for x in range(law.shape[0]):
        difference = float32(chance * law[x]) - row[x]
        difference = difference if difference > _NOTHING else _NOTHING
        law[x] = difference
        mass += difference
    return mass


@kernel()
def _without(law: Any, row: Any, chance: Any, p: Any) -> Any:
    """Update a place's law after rejecting a child drawn from row; returns its new chance."""
    mass = _take(law, row, chance)
    if mass > _NOTHING:
        least = max(mass, float32(1e-30))
        for x in range(law.shape[0]):
            law[x] /= least
    else:
        law[:] = p
    rejected = mass + (_ONE - chance)
    return _ONE if rejected <= _NOTHING else float32(mass / rejected)


@kernel()
def _ratio(law: Any, row: Any, token: Any) -> Any:
    """Ratio law / row of a token, finite."""
    if row[token] == _NOTHING:
        return _ONE if law[token] == _NOTHING else _MAX_RATIO
    return min(float32(law[token] / row[token]), _MAX_RATIO)


@kernel()
def _overlaps(p: Any, rows: Any, draft: Any, out: Any) -> None:
    """Σ_x min(p, q) of each node's row, at the node's parent place."""
    tokens, parents, row_of, ends, ids, weights, _ = draft
    for node in range(len(tokens)):
        own = p[rows[parents[node]]]
        first, end = ends[row_of[node]], ends[row_of[node] + 1]
        total, overlap = 0, 0.0
        for k in range(first, end):
            total += weights[k]
        for k in range(first, end):
            overlap += min(float64(own[ids[k]]), weights[k] / float64(total))
        out[3 + node] = overlap if first < end else min(float64(own[tokens[node]]), 1.0)


@kernel(any_order=True)
def _total(law: Any) -> Any:
    total = 0.0
    for x in range(law.shape[0]):
        total += float64(law[x])
    return total


@kernel()
def _draw(law: Any, uniform: Any) -> Any:
    """Draw a token by inverse CDF; 0 if there is no weight."""
    point, reached, last = uniform * _total(law), 0.0, 0
    for x in range(law.shape[0]):
        if law[x] > _NOTHING:
            reached += float64(law[x])
            last = x
            if reached > point:
                break
    return last


@kernel()
def _result(p: Any, rows: Any, draft: Any, place: Any, law: Any, uniform: Any, out: Any) -> None:
    """Fill in `out`; the next token is drawn from the law of the kept place."""
    # NaN weights draw token 0, but make out[2] NaN.
    out[0], out[1], out[2] = place, _draw(law, uniform), 0.0
    for i in range(rows.max() + 1):
        out[2] += p[i, 0]
    _overlaps(p, rows, draft, out)


SIGNATURE = void(
    readonly(float32, 2),
    readonly(int64),
    readonly(int64),
    readonly(int64),
    readonly(int64),
    readonly(uint32),
    readonly(uint16),
    boolean,
    readonly(float64),
    float32[::1],
    float32[::1],
    float64[::1],
)


@kernel(SIGNATURE)
def decide_token_tree(
    p: Any, tokens: Any, parents: Any, row_of: Any, sizes: Any, ids: Any, weights: Any,
    distinct: Any, uniforms: Any, law: Any, row: Any, out: Any,
) -> None:  # fmt: skip
    """`RecursiveRejection`: follow the first child that passes, from the root, until none does."""
    draft = (tokens, parents, row_of, _ends(sizes), ids, weights, distinct)
    count, (homes, rows) = len(tokens), _layout(tokens, parents)
    place, going = 0, True
    while going:
        going = False
        own = p[rows[place]]
        law[:] = own
        for node in range(place, count):
            if parents[node] != place:
                continue
            _write(row, node, draft)
            going = uniforms[node] < min(_ratio(law, row, tokens[node]), _ONE)
            if not going:
                _without(law, row, _ONE, own)
            _clear(row, node, draft)
            if going:
                place = homes[node]
                break
    _result(p, rows, draft, place, law, uniforms[count], out)


@kernel()
def _leave(place: Any, chance: Any, own: Any, draft: Any, law: Any, row: Any, arrived: Any) -> Any:
    """The chance and the law after a place's last child; writes each child's ω to `arrived`."""
    tokens, parents, _, _, _, _, _ = draft
    law[:] = own
    for node in range(place, len(tokens)):
        if parents[node] == place:
            _write(row, node, draft)
            arrived[node + 1] = min(float32(chance * _ratio(law, row, tokens[node])), _ONE)
            chance = _without(law, row, chance, own)
            _clear(row, node, draft)
    return chance


@kernel(SIGNATURE)
def decide_block_tree(
    p: Any, tokens: Any, parents: Any, row_of: Any, sizes: Any, ids: Any, weights: Any,
    distinct: Any, uniforms: Any, law: Any, row: Any, out: Any,
) -> None:  # fmt: skip
    """`Traversal`: keep up to the first node that passes, children before their parents."""
    draft = (tokens, parents, row_of, _ends(sizes), ids, weights, distinct)
    count, (homes, rows) = len(tokens), _layout(tokens, parents)
    arrived, after = np.ones(count + 1, np.float32), np.ones(count + 1, np.float32)
    inner = np.zeros(count + 1, np.bool_)
    for node in range(count):
        inner[parents[node]] = True
    for place in range(count + 1):
        after[place] = arrived[place]
        if inner[place]:
            own = p[rows[place]]
            after[place] = _leave(place, arrived[place], own, draft, law, row, arrived)
    kept = 0
    for node in _from_leaves(parents):
        if uniforms[node] < after[node + 1]:
            kept = homes[node]
            break
    _leave(kept, arrived[kept], p[rows[kept]], draft, law, row, arrived)
    _result(p, rows, draft, kept, law, uniforms[count], out)


@kernel()
def _draws(place: Any, parents: Any) -> Any:
    """The first node at a place, -1 if there is none, and the number of nodes there."""
    first, draws = -1, 0
    for node in range(len(parents) - 1, place - 1, -1):
        if parents[node] == place:
            first = node
            draws += 1
    return first, draws


@kernel()
def _support(node: Any, draft: Any) -> Any:
    """[K] int64: the tokens of a node's row."""
    tokens, _, row_of, ends, ids, _, _ = draft
    first, end = ends[row_of[node]], ends[row_of[node] + 1]
    return ids[first:end].astype(np.int64) if first < end else tokens[node : node + 1].copy()


@kernel(any_order=True)
def _common(p: Any, q: Any, rho: Any) -> Any:
    """β = Σ_x min(p / ρ, q) of [K] float32 entries, in float64."""
    beta = 0.0
    for x in range(len(p)):
        beta += min(p[x] / rho, float64(q[x]))
    return beta


@kernel()
def _accepted(beta: Any, draws: Any) -> Any:
    """1 - (1 - β)^k, for β in [0, 1]."""
    return -math.expm1(draws * math.log1p(-min(beta, 1.0)))


@kernel()
def _factor(p: Any, q: Any, draws: Any) -> Any:
    """The least ρ in [1, k] at which k draws accept no more than ρ β, rounded up: `factor`."""
    low, high = 1.0, float64(draws)
    for _ in range(_HALVINGS):
        rho = (low + high) / 2
        beta = _common(p, q, rho)
        if _accepted(beta, draws) * _MARGIN <= rho * beta:
            high = rho
        else:
            low = rho
    return high


@kernel()
def _subtract_common(law: Any, row: Any, support: Any, rho: Any, draws: Any, own: Any) -> None:
    """Replace law by p - min(p / ρ, q) (1 - (1 - β)^k) / β; by p if rounding left nothing."""
    beta = _common(law[support], row[support], rho)
    share = _accepted(beta, draws) / max(beta, 1e-30)
    for x in support:
        law[x] = max(law[x] - min(law[x] / rho, float64(row[x])) * share, 0.0)
    if _total(law) <= 0.0:
        law[:] = own


@kernel(SIGNATURE)
def decide_spectr(
    p: Any, tokens: Any, parents: Any, row_of: Any, sizes: Any, ids: Any, weights: Any,
    distinct: Any, uniforms: Any, law: Any, row: Any, out: Any,
) -> None:  # fmt: skip
    """`KSeq`: follow the first draw whose uniform is below p / (ρ q), from the root, until none is.

    Finds the factors ρ of this path's places alone.
    """
    draft = (tokens, parents, row_of, _ends(sizes), ids, weights, distinct)
    count, (homes, rows) = len(tokens), _layout(tokens, parents)
    place, going = 0, True
    while going:
        going = False
        own = p[rows[place]]
        law[:] = own
        first, draws = _draws(place, parents)
        if not draws:
            break
        support = _support(first, draft)
        _write(row, first, draft)
        rho = _factor(law[support], row[support], draws)
        for node in range(first, count):
            if parents[node] == place and uniforms[node] < _ratio(law, row, tokens[node]) / rho:
                place, going = homes[node], True
                break
        if not going:
            _subtract_common(law, row, support, rho, draws, own)
        _clear(row, first, draft)
    _result(p, rows, draft, place, law, uniforms[count], out)


@kernel()
def _rank(law: Any, row: Any, token: Any) -> Any:
    """A number that orders tokens by p / q, and those of one ratio by their ids."""
    # Floats that are not negative have the order of their bits.
    return int64(np.float32(_ratio(law, row, token)).view(np.int32)) << 32 | token


@kernel()
def _best_of(law: Any, row: Any, first: Any, draws: Any, draft: Any) -> Any:
    """The draw with the largest p / q at a place; q in row becomes its law.

    See `best_of` in `gbv.py` for the equation.
    """
    tokens, parents, _, _, _, _, _ = draft
    best = first
    for node in range(first + 1, len(tokens)):
        if parents[node] != parents[first]:
            continue
        if _rank(law, row, tokens[node]) > _rank(law, row, tokens[best]):
            best = node
    ranks = _support(first, draft)
    for k in range(len(ranks)):
        ranks[k] = _rank(law, row, ranks[k])
    ranks.sort()
    below, mass = 0.0, 0.0
    for rank in ranks:
        token = rank & 0xFFFFFFFF
        upto, total, power = below + row[token], 1.0, 1.0
        for _ in range(draws - 1):
            power *= upto
            total = total * below + power
        row[token] *= total
        mass += row[token]
        below = upto
    for rank in ranks:
        row[rank & 0xFFFFFFFF] /= max(mass, 1e-30)
    return best


@kernel()
def _along(place: Any, chance: Any, own: Any, draft: Any, law: Any, row: Any) -> Any:
    """The next node of the path, -1 at its end; its ω; and h of this place. Law becomes what
    `GbvJudged.residual` is here, normalised."""
    tokens, parents, _, _, _, _, _ = draft
    law[:] = own
    first, draws = _draws(place, parents)
    if not draws:
        return first, chance, chance
    _write(row, first, draft)
    node = _best_of(law, row, first, draws, draft)
    arrived = min(float32(chance * _ratio(law, row, tokens[node])), _ONE)
    h = _without(law, row, chance, own)
    _clear(row, first, draft)
    return node, arrived, h


@kernel(SIGNATURE)
def decide_gbv(
    p: Any, tokens: Any, parents: Any, row_of: Any, sizes: Any, ids: Any, weights: Any,
    distinct: Any, uniforms: Any, law: Any, row: Any, out: Any,
) -> None:  # fmt: skip
    """`BestPath`: of the path with the largest p / q, keep up to the last node that passes.

    From its root on (Algorithm 2 of arXiv 2403.10444), with the law of the best draw as q.
    """
    draft = (tokens, parents, row_of, _ends(sizes), ids, weights, distinct)
    count, (homes, rows) = len(tokens), _layout(tokens, parents)
    kept, joint = 0, _ONE
    node, arrived, _ = _along(kept, joint, p[0], draft, law, row)
    while node >= 0:
        place, chance, last = homes[node], arrived, node
        node, arrived, h = _along(place, chance, p[rows[place]], draft, law, row)
        if uniforms[last] < h:
            kept, joint = place, chance
    _along(kept, joint, p[rows[kept]], draft, law, row)
    _result(p, rows, draft, kept, law, uniforms[count], out)
