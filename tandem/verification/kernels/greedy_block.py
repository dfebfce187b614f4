"""Verdicts of `greedy_block.py` on a CPU, by one kernel call per sequence.

Nested levels (equation 31) reduce to two numbers. A level of ratio r turns a row
T = (p - s q)+ / m into the weights (T - q / r)+ = (p - (s + m / r) q)+ / m, so any number of levels
gives (p - shift q)+ / mass. The sum over all of V, for tokens where q is 0, is computed once per
row; a level takes as many steps as the drafter's row has entries. Differences of differences matter
here, so they are float64.

No compiled code is shared with `chains.py`: numba recompiles a kernel when the kernel's own file
changes, but not when the file of a function that it calls does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import float32

from tandem.speculation.kernel import kernel
from tandem.verification.kernels.chains import SIGNATURE

# As in `ratios.py` and `verification/greedy_block.py`.
_MAX_RATIO = 1e18
_MAX_LOG_RATIO = math.log(_MAX_RATIO)


@kernel()
def _read(p: Any, token: Any, ids: Any, weights: Any, first: Any, end: Any) -> Any:
    """The tokens of a row of q, with their p and q."""
    size = max(end - first, 1)
    places, ps, qs = np.empty(size, np.int64), np.empty(size), np.empty(size)
    if first == end:  # certain
        places[0], ps[0], qs[0] = token, p[token], 1.0
    total = 0
    for k in range(first, end):
        total += weights[k]
    for k in range(first, end):
        token = ids[k]
        places[k - first], ps[k - first] = token, p[token]
        qs[k - first] = float32(weights[k] / total)
    return places, ps, qs


@kernel()
def _entry(token: Any, places: Any, qs: Any) -> Any:
    """q of a token."""
    for k in range(len(places)):
        if places[k] == token:
            return qs[k]
    return 0.0


@kernel()
def _overlap(p: Any, q: Any) -> Any:
    """Σ_x min(p, q)."""
    total = 0.0
    for x in range(len(q)):
        total += min(p[x], q[x])
    return total


@kernel(any_order=True)
def _outside(p: Any, places: Any, row: Any) -> Any:
    """Σ_x p(x) of all tokens except `places`; `row` is all zeros before and afterwards."""
    for place in places:
        row[place] = 1.0
    total = 0.0
    for x in range(len(p)):
        total += p[x] if row[x] == 0.0 else 0.0
    for place in places:
        row[place] = 0.0
    return total


@kernel()
def _positive(value: Any) -> Any:
    return value if value > 0.0 else 0.0


@kernel(any_order=True)
def _beyond(p: Any, q: Any, shift: Any) -> Any:
    """Σ_x (p - shift q)+."""
    total = 0.0
    for x in range(len(p)):
        total += _positive(p[x] - shift * q[x])
    return total


@kernel()
def _fold(
    p: Any, q: Any, outside: Any, log_ratios: Any, counts: Any, i: Any, shifts: Any, masses: Any
) -> None:
    """Equation (31) at place i: shift and mass of T_0 = p, T_1, ..., T_J."""
    shifts[0], masses[0] = 0.0, 1.0
    for j in range(len(shifts) - 1):
        shifts[j + 1], masses[j + 1] = shifts[j], masses[j]
        if counts[j] > i:
            shift = shifts[j] + masses[j] * math.exp(-log_ratios[j])
            mass = outside + _beyond(p, q, shift)
            if mass > 0.0:  # else rounding left nothing, and the row stays unchanged
                shifts[j + 1], masses[j + 1] = shift, mass


@kernel(any_order=True)
def _chance(p: Any, q: Any, outside: Any, shift: Any, scale: Any) -> Any:
    """p_remain / p_rej (equations 32 and 33), at most 1; `scale` is the joint ratio / mass."""
    remain, rejected = scale * outside, 0.0
    for x in range(len(p)):
        difference = scale * _positive(p[x] - shift * q[x]) - q[x]
        remain += _positive(difference)
        rejected += _positive(-difference)
    return 1.0 if rejected <= 0.0 else min(remain / rejected, 1.0)


@kernel()
def _ratio(p: Any, q: Any, shift: Any, mass: Any) -> Any:
    """T_j / q of a drafted token, finite: as `ratios` of `ratios.py`."""
    left = _positive(p - shift * q) / mass
    if q == 0.0:
        return 1.0 if left == 0.0 else _MAX_RATIO
    return min(left / q, _MAX_RATIO)


@kernel()
def _bounded(log_ratio: Any) -> Any:
    return min(max(log_ratio, -_MAX_LOG_RATIO), _MAX_LOG_RATIO)


@kernel()
def _walk(
    p: Any,
    tokens: Any,
    sizes: Any,
    ids: Any,
    weights: Any,
    uniforms: Any,
    row: Any,
    counts: Any,
    log_ratios: Any,
    shifts: Any,
    masses: Any,
    joints: Any,
    overlaps: Any,
) -> Any:
    """Fill in the tables along the drafted tokens; return how many to keep."""
    gamma, depth = len(tokens), len(counts) - 1
    kept, first = 0, 0
    for i in range(gamma):
        end = first + sizes[i]
        places, ps, qs = _read(p[i], tokens[i], ids, weights, first, end)
        first = end
        overlaps[i] = _overlap(ps, qs)
        outside = _outside(p[i], places, row)
        _fold(ps, qs, outside, log_ratios[i], counts, i, shifts[i], masses[i])
        shift, mass = shifts[i, depth], masses[i, depth]
        if i > 0 and uniforms[i - 1] < _chance(ps, qs, outside, shift, joints[i] / mass):
            kept = i
        at_token, q = float(p[i, tokens[i]]), _entry(tokens[i], places, qs)
        for j in range(depth):
            step = math.log(_ratio(at_token, q, shifts[i, j], masses[i, j]))
            log_ratios[i + 1, j] = _bounded(log_ratios[i, j] + step)
        joints[i + 1] = min(joints[i] * _ratio(at_token, q, shift, mass), _MAX_RATIO)
    if gamma > 0 and uniforms[gamma - 1] < min(joints[gamma], 1.0):
        kept = gamma
    return kept


@kernel()
def _draw(p: Any, q: Any, shift: Any, uniform: Any) -> Any:
    """Draw a token with weights (p - shift q)+ by inverse CDF; -1 if all weights are 0."""
    point, reached, last = uniform * _beyond(p, q, shift), 0.0, -1
    for x in range(len(p)):
        weight = _positive(p[x] - shift * q[x])
        if weight > 0.0:
            reached += weight
            last = x
            if reached > point:
                break
    return last


@kernel()
def _follow(
    p: Any, places: Any, qs: Any, shift: Any, mass: Any, joint: Any, uniform: Any, row: Any
) -> Any:
    """Draw a correction with the weights of equation (30), which are those of one more level."""
    for k in range(len(places)):
        row[places[k]] = qs[k]
    token = _draw(p, row, shift + mass / joint, uniform)
    if token < 0:  # rounding left no weight
        token = _draw(p, row, shift, uniform)
    for place in places:
        row[place] = 0.0
    return max(token, 0)  # -1 if weights are NaN, which the caller must detect


@kernel()
def _move_on(
    p: Any, q: Any, log_ratios: Any, counts: Any, kept: Any, shifts: Any, masses: Any, state: Any
) -> None:
    """Algorithm 5: the levels after the next token, if they still cover further positions."""
    if q == 0.0:  # with an infinite ratio a level modifies nothing any more
        return
    depth, used = len(state) // 2, 0
    for j in range(len(counts)):
        left = _positive(p - shifts[j] * q) / masses[j]
        log_ratio = log_ratios[j] + math.log(left / q)
        count = counts[j] - kept - 1
        if count > 0 and math.isfinite(log_ratio) and used < depth:
            state[used], state[depth + used] = _bounded(log_ratio), count
            used += 1


@kernel(SIGNATURE)
def decide_greedy_block(
    p: Any,
    tokens: Any,
    sizes: Any,
    ids: Any,
    weights: Any,
    uniforms: Any,
    row: Any,
    state: Any,
    out: Any,
) -> None:
    """`GreedyBlockVerifier`; see there for the equations.

    Row i of a table is for the first i drafted tokens; its columns are the levels of the state,
    then this round's own.
    """
    gamma, depth = len(tokens), len(state) // 2
    counts = np.empty(depth + 1)
    counts[depth] = gamma
    shape = gamma + 1, depth + 1
    log_ratios, shifts, masses = np.empty(shape), np.empty(shape), np.empty(shape)
    joints = np.empty(gamma + 1)
    joints[0] = 1.0
    for j in range(depth):
        log_ratios[0, j], counts[j] = state[j], state[depth + j]
        state[j] = state[depth + j] = 0.0
    kept = _walk(
        p,
        tokens,
        sizes,
        ids,
        weights,
        uniforms,
        row,
        counts,
        log_ratios,
        shifts,
        masses,
        joints,
        out[3:],
    )
    out[0], out[2] = kept, 0.0
    for i in range(gamma + 1):  # a NaN logit makes its whole row NaN
        out[2] += p[i, 0]
    if kept == gamma:  # the target's own row, which no level reaches
        out[1] = max(_draw(p[gamma], row, 0.0, uniforms[gamma]), 0)
        return
    first = 0
    for i in range(kept):
        first += sizes[i]
    end = first + sizes[kept]
    places, _, qs = _read(p[kept], tokens[kept], ids, weights, first, end)
    shift, mass = shifts[kept, depth], masses[kept, depth]
    token = _follow(p[kept], places, qs, shift, mass, joints[kept], uniforms[gamma], row)
    log_ratios[kept, depth] = math.log(joints[kept])
    at_token, q = float(p[kept, token]), _entry(token, places, qs)
    _move_on(at_token, q, log_ratios[kept], counts, kept, shifts[kept], masses[kept], state)
    out[1] = token
