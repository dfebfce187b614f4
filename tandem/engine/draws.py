"""Tokens drawn for many sequences at once, and their way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.engine.asks import Draw
from tandem.engine.host import to_host
from tandem.inference.feed import Drawn, Draws
from tandem.speculation.categorical import Categorical
from tandem.speculation.distribution import process
from tandem.speculation.draft import Draft
from tandem.speculation.randomness import foresee


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
    probs = process(logits, [ask.sampling for ask in asks])
    truncation = asks[0].truncation
    drawn = Categorical.quantize(probs, truncation.mass, truncation.support)
    digits = torch.from_numpy(_digits(asks)).to(logits.device, non_blocking=True)
    return Draws(drawn.draw(digits), drawn)


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
    rows_of: dict[int, list[int]] = {}
    indices_of: dict[int, list[int]] = {}
    count = 0
    for chain in chains:
        for drawn in chain:
            key = id(drawn.draws)
            steps[key] = drawn.draws
            rows_of.setdefault(key, []).append(count)
            indices_of.setdefault(key, []).append(drawn.index)
            count += 1
    arrays = to_host([t for s in steps.values() for t in (s.tokens, s.rows.ids, s.rows.weights)])
    widest = max((ids.shape[1] for ids in arrays[1::3]), default=1)
    token_ids = np.zeros(count, np.int64)
    ids, weights = np.zeros((2, count, widest), np.int64)
    for key, drawn_ids, row_ids, row_weights in zip(
        steps, arrays[::3], arrays[1::3], arrays[2::3], strict=True
    ):
        rows, indices = rows_of[key], indices_of[key]
        token_ids[rows] = drawn_ids[indices]
        ids[rows, : row_ids.shape[1]] = row_ids[indices]
        weights[rows, : row_ids.shape[1]] = row_weights[indices]
    return Draft.batch(token_ids, ids, weights, [len(chain) for chain in chains])
