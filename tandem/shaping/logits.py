"""Logits of a pass, changed as the requests of its rows ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.shaping.text import ShapedRows


def shape(logits: Tensor, texts: Sequence[tuple[int, ShapedRows]]) -> Tensor:
    """The logits with bias, penalties and masks: all texts in a few operations.

    Args:
        logits: [R, V], which stay as they are.
        texts: what applies, each with its first row of `logits`. Ids beyond V are left out.

    Returns:
        [R, V] float32 (float64 for float64 logits).
    """
    vocab_size = logits.shape[1]
    if logits.dtype != torch.float64:
        logits = logits.float()

    def column(values: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(values[kept]).to(logits.device, non_blocking=True)

    ids = np.concatenate([text.ids for _, text in texts])
    kept = ids < vocab_size
    if kept.any():
        rows = column(np.concatenate([text.rows + first for first, text in texts]))
        index = rows, column(ids)
        values = logits[index] + column(np.concatenate([text.bias for _, text in texts]))
        factors = [text.shaping.repetition_penalty for _, text in texts]
        if any(factor != 1 for factor in factors):
            factor = column(_each(texts, factors))
            penalised = torch.where(values > 0, values / factor, values * factor)
            seen = column(np.concatenate([text.seen for _, text in texts]))
            values = torch.where(seen, penalised, values)
        counts = column(np.concatenate([text.counts for _, text in texts]))
        frequency = column(_each(texts, [text.shaping.frequency_penalty for _, text in texts]))
        presence = column(_each(texts, [text.shaping.presence_penalty for _, text in texts]))
        values = values - frequency * counts - presence * (counts > 0)
        logits = logits.index_put(index, values.to(logits.dtype))
    masked = [(first, text.bits) for first, text in texts if text.bits is not None]
    if masked:
        bits = torch.from_numpy(np.concatenate([own for _, own in masked]).view(np.int32))
        bits = bits.to(logits.device, non_blocking=True)
        places = torch.arange(min(vocab_size, bits.shape[1] * 32), device=logits.device)
        allowed = ((bits[:, places >> 5] >> (places & 31).int()) & 1).bool()
        # Ids without a bit may not come.
        allowed = torch.nn.functional.pad(allowed, (0, vocab_size - len(places)))
        numbers = [first + row for first, own in masked for row in range(len(own))]
        there = torch.tensor(numbers, dtype=torch.long).to(logits.device, non_blocking=True)
        logits = logits.index_put((there,), logits[there].masked_fill(~allowed, -torch.inf))
    return logits


def _each(texts: Sequence[tuple[int, ShapedRows]], values: Sequence[float]) -> npt.NDArray[Any]:
    """A value a text, repeated for its entries."""
    return np.repeat(np.array(values, np.float32), [len(text.ids) for _, text in texts])
