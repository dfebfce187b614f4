"""Verdicts of `token.py` and `block.py` on a CPU, by one kernel call per sequence.

Each kernel follows its rule's file line by line, and uses float32 where that file does; only the
order of summation differs. A draft is read in its sparse form: one row of q at a time is written
into a buffer of zeros, used, and cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import float32, float64, int64, uint16, uint32, void

from tandem.speculation.draft import Draft
from tandem.speculation.kernel import kernel, readonly

# As in `ratios.py`.
_MAX_RATIO = np.float32(1e18)
_ONE, _NOTHING = np.float32(1), np.float32(0)
_NO_TOKENS = np.empty(0, np.int64)

# decide(p, tokens, sizes, ids, weights, uniforms, row, state, out):
#   p [G+1, V] float32; the draft: tokens, sizes [G] int64, ids [N] uint32, weights [N] uint16;
#   uniforms [G+1] float64 as in `Verifier.verify`; row [V] float32, zeros before and afterwards;
#   state [S] float64 from `Verifier.pack`, overwritten by the next round's;
#   out [3 + G] float64: kept, next token, a number that is finite iff all rows are, overlaps.
FusedVerdict = Callable[..., None]


@kernel()
def _check(p: Any) -> Any:
    """A number that is finite iff all rows are: a NaN logit makes its whole row NaN."""
    total = 0.0
    for i in range(p.shape[0]):
        total += p[i, 0]
    return total


@kernel()
def _total(weights: Any, first: Any, end: Any) -> Any:
    total = 0
    for k in range(first, end):
        total += weights[k]
    return float(total)


@kernel()
def _ratio_and_overlap(p: Any, token: Any, ids: Any, weights: Any, first: Any, end: Any) -> Any:
    """p / q of a drafted token, finite, and Σ_x min(p, q) of its row."""
    at_token = p[token]
    if first == end:  # certain
        return at_token, min(float64(at_token), 1.0)
    total, q, overlap = _total(weights, first, end), _NOTHING, 0.0
    for k in range(first, end):
        prob = weights[k] / total
        overlap += min(float64(p[ids[k]]), prob)
        if ids[k] == token:
            q = float32(prob)
    if q == _NOTHING:
        return (_ONE if at_token == _NOTHING else _MAX_RATIO), overlap
    return min(float32(at_token / q), _MAX_RATIO), overlap


@kernel()
def _write(row: Any, token: Any, ids: Any, weights: Any, first: Any, end: Any) -> None:
    """Write a row of q into a buffer of zeros."""
    if first == end:
        row[token] = _ONE
    total = _total(weights, first, end)
    for k in range(first, end):
        row[ids[k]] = float32(weights[k] / total)


@kernel()
def _clear(row: Any, token: Any, ids: Any, first: Any, end: Any) -> None:
    row[token] = _NOTHING
    for k in range(first, end):
        row[ids[k]] = _NOTHING


@kernel(any_order=True)
def _excess(p: Any, q: Any, joint: Any) -> Any:
    """Σ_x (joint p - q)+."""
    total = _NOTHING
    for x in range(p.shape[0]):
        difference = float32(joint * p[x]) - q[x]
        total += difference if difference > _NOTHING else _NOTHING
    return total


@kernel(any_order=True)
def _weight(p: Any, q: Any, joint: Any) -> Any:
    """Σ_x (joint p - q)+ in float64."""
    total = 0.0
    for x in range(p.shape[0]):
        difference = float32(joint * p[x]) - q[x]
        total += float64(difference if difference > _NOTHING else _NOTHING)
    return total


@kernel()
def _draw(p: Any, q: Any, joint: Any, uniform: Any) -> Any:
    """Draw a token with weights (joint p - q)+ by inverse CDF; -1 if all weights are 0."""
    point, reached, last = uniform * _weight(p, q, joint), 0.0, -1
    for x in range(p.shape[0]):
        difference = float32(joint * p[x]) - q[x]
        if difference > _NOTHING:
            reached += float64(difference)
            last = x
            if reached > point:
                break
    return last


@kernel()
def _follow(
    p: Any,
    kept: Any,
    joint: Any,
    tokens: Any,
    sizes: Any,
    ids: Any,
    weights: Any,
    uniform: Any,
    row: Any,
) -> Any:
    """The token after the kept ones: drawn from the residual, or from p if that is empty."""
    token = -1
    if kept < len(tokens):
        first = 0
        for i in range(kept):
            first += sizes[i]
        end = first + sizes[kept]
        _write(row, tokens[kept], ids, weights, first, end)
        token = _draw(p[kept], row, joint, uniform)
        _clear(row, tokens[kept], ids, first, end)
    if token < 0:
        token = _draw(p[kept], row, _ONE, uniform)
    return max(token, 0)  # -1 if weights are NaN, which the caller must detect


SIGNATURE = void(
    readonly(float32, 2),
    readonly(int64),
    readonly(int64),
    readonly(uint32),
    readonly(uint16),
    readonly(float64),
    float32[::1],
    float64[::1],
    float64[::1],
)


@kernel(SIGNATURE)
def decide_token(
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
    """`TokenVerifier`: keep tokens up to the first whose uniform is not below p / q."""
    kept, first, going = 0, 0, True
    for i in range(len(tokens)):
        end = first + sizes[i]
        ratio, out[3 + i] = _ratio_and_overlap(p[i], tokens[i], ids, weights, first, end)
        first = end
        going = going and uniforms[i] < min(ratio, _ONE)
        if going:
            kept += 1
    out[0], out[2] = kept, _check(p)
    out[1] = _follow(p, kept, _ONE, tokens, sizes, ids, weights, uniforms[len(tokens)], row)


@kernel(SIGNATURE)
def decide_block(
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
    """`BlockVerifier`: the last row that passes counts; see there for the equations."""
    kept, first, gamma = 0, 0, len(tokens)
    joints = np.ones(gamma + 1, np.float32)
    for i in range(gamma):
        end = first + sizes[i]
        ratio, out[3 + i] = _ratio_and_overlap(p[i], tokens[i], ids, weights, first, end)
        joints[i + 1] = min(float32(joints[i] * ratio), _ONE)
        first = end
    first = 0
    for i in range(1, gamma + 1):  # whether to keep i tokens, whose residual is at row i
        joint = joints[i]
        chance = joint
        first += sizes[i - 1]
        if i < gamma:
            _write(row, tokens[i], ids, weights, first, first + sizes[i])
            residual = _excess(p[i], row, joint)
            _clear(row, tokens[i], ids, first, first + sizes[i])
            rejected = residual + (_ONE - joint)
            chance = _ONE if rejected <= _NOTHING else residual / rejected
        if uniforms[i - 1] < chance:
            kept = i
    out[0], out[2] = kept, _check(p)
    last = uniforms[gamma]
    out[1] = _follow(p, kept, joints[kept], tokens, sizes, ids, weights, last, row)


def decide_all(
    decide: FusedVerdict,
    p: npt.NDArray[np.float32],
    starts: Sequence[int],
    drafts: Sequence[Draft],
    uniforms: npt.NDArray[np.float64],
    states: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Verdicts of one rule for several drafts that are chains.

    Args:
        decide: the rule's kernel.
        p: [R, V] processed rows of the target.
        starts: each draft's first row; a draft has one row more than tokens.
        drafts: already checked.
        uniforms: [B, G+1] for drafts up to length G, as in `Verifier.verify`: the last column
            draws the next token.
        states: [B, S], from `Verifier.pack`.

    Returns:
        [B, 3 + G + S] float64: tokens kept, next token, a number that is finite iff all rows are,
        overlaps, the state for the next round.
    """
    longest = uniforms.shape[1]
    numbers = np.hstack((np.zeros((len(states), longest + 2)), states))
    decided, carried = np.hsplit(numbers, (longest + 2,))
    row = np.zeros(p.shape[1], np.float32)
    for b, (draft, start) in enumerate(zip(drafts, starts, strict=True)):
        length = len(draft)
        own = uniforms[b]
        if length + 1 < longest:  # the uniforms of its tokens, then the last column
            own = np.append(own[:length], own[-1])
        decide(
            p[start : start + length + 1],
            np.array(draft.token_ids, np.int64) if length else _NO_TOKENS,
            np.array(draft.sizes, np.int64) if length else _NO_TOKENS,
            draft.ids,
            draft.weights,
            own,
            row,
            carried[b],
            decided[b],
        )
    return numbers


def decide_trees(
    decide: Callable[..., None],
    p: npt.NDArray[np.float32],
    starts: Sequence[int],
    drafts: Sequence[Draft],
    uniforms: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """Verdicts of one rule for several drafts that are trees.

    Args:
        decide: the rule's kernel, of `trees.py`.
        p: [R, V] processed rows of the target.
        starts: each draft's first row; a draft has one row more than nodes that are no twins.
        drafts: already checked.
        uniforms: [B, N+1] for drafts up to N nodes, as in `Verifier.verify`: the last column draws
            the next token.

    Returns:
        [B, 3 + N] float64: place of the last kept node, next token, a number that is finite iff
        all rows are, overlaps.
    """
    longest = uniforms.shape[1]
    numbers = np.zeros((len(drafts), longest + 2))
    law, row = np.zeros((2, p.shape[1]), np.float32)
    for b, (draft, start) in enumerate(zip(drafts, starts, strict=True)):
        count = len(draft)
        own = uniforms[b]
        if count + 1 < longest:  # the uniforms of its nodes, then the last column
            own = np.append(own[:count], own[-1])
        lists = draft.token_ids, draft.places(), draft.rows_of_nodes(), draft.sizes
        nodes = [np.array(each, np.int64) for each in lists]
        rows = p[start : start + count + 1]
        entries = draft.ids, draft.weights, draft.distinct
        decide(rows, *nodes, *entries, own, law, row, numbers[b])
    return numbers
