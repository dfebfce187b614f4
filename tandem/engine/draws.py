"""Tokens drawn for many sequences at once, and their way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.asks import Draw
from tandem.engine.host import to_host
from tandem.inference.feed import Drawn, Draws
from tandem.speculation.categorical import MAX_WEIGHT, Categorical
from tandem.speculation.distribution import process
from tandem.speculation.draft import Draft
from tandem.speculation.randomness import foresee
from tandem.speculation.sampler import sample

# Of a kernel that multiplies weights' sums by 32 bits at a time.
_FUSED_SUPPORT = 2**31 // MAX_WEIGHT


def draw(asks: Sequence[Draw], logits: Tensor, rows: Sequence[int]) -> Draws:
    """A token for each ask: process, truncate, round, draw.

    Args:
        asks: at least one.
        logits: [R, V] of a pass.
        rows: each ask's row.
    """
    if len(rows) < len(logits):
        logits = logits.index_select(0, torch.tensor(rows).to(logits.device, non_blocking=True))
    logits = _within_vocabulary(asks, logits)
    if all(ask.sampling.greedy for ask in asks):
        certain = Categorical.argmax(logits)
        return Draws(certain.ids[:, 0], certain)
    probs, digits = process(logits, [ask.sampling for ask in asks]), _digits(asks)
    mass, support = asks[0].truncation.mass, asks[0].truncation.support
    if not probs.is_cuda and 0 < support < _FUSED_SUPPORT:
        tokens, ids, weights = map(torch.from_numpy, sample(probs.numpy(), mass, support, digits))
        return Draws(tokens, Categorical(ids, weights))
    drawn = Categorical.quantize(probs, mass, support)
    there = torch.from_numpy(digits).to(probs.device, non_blocking=True)
    return Draws(drawn.draw(there), drawn)


def _digits(asks: Sequence[Draw]) -> np.ndarray:
    """[B, 2] of each ask's own number."""
    unforeseen = [
        (ask.numbers, ask.round, ask.rows)
        for ask in asks
        if not ask.numbers.covers(ask.round, ask.rows)
    ]
    if unforeseen:
        foresee(unforeseen)
    return np.stack([ask.numbers.take(ask.round, ask.rows)[ask.row] for ask in asks])


def _within_vocabulary(asks: Sequence[Draw], logits: Tensor) -> Tensor:
    """Logits [B, V] without the ids that a request's target does not have."""
    vocab_size = logits.shape[1]
    sizes = [min(ask.vocab_size, vocab_size) for ask in asks]
    if max(sizes) < vocab_size:
        logits = logits[:, : max(sizes)]
    for row, size in enumerate(sizes):
        if size < logits.shape[1]:
            logits[row, size:] = -torch.inf
    return logits


def drafts_of(chains: Sequence[Sequence[Drawn]]) -> list[Draft | None]:
    """Each sequence's draws as a draft; None where a distribution was not finite."""
    steps: dict[int, Draws] = {}
    firsts: dict[int, int] = {}
    count = 0
    for chain in chains:
        for drawn in chain:
            key = id(drawn.draws)
            if key not in steps:
                steps[key], firsts[key] = drawn.draws, count
                count += len(drawn.draws.tokens)
    arrays = to_host([t for s in steps.values() for t in (s.tokens, s.rows.ids, s.rows.weights)])
    rows = [firsts[id(drawn.draws)] + drawn.index for chain in chains for drawn in chain]
    tokens, ids, weights = (_joined(arrays[part::3]) for part in range(3))
    if rows != list(range(count)):
        tokens, ids, weights = tokens[rows], ids[rows], weights[rows]
    return Draft.batch(tokens, ids, weights, [len(chain) for chain in chains])


def _joined(arrays: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """The rows of all, padded with zeros to one width."""
    widest = max(array.shape[-1] for array in arrays)
    if arrays[0].ndim > 1 and any(array.shape[1] < widest for array in arrays):
        arrays = [np.pad(array, ((0, 0), (0, widest - array.shape[1]))) for array in arrays]
    return np.concatenate(arrays)
