"""The likeliest tokens at the places of rounds, picked where the verdicts are taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.answers import LikeliestRows, PredictedRows
from tandem.engine.asks import Decide
from tandem.speculation.categorical import MAX_WEIGHT


def predict(asks: Sequence[Decide]) -> dict[int, PredictedRows]:
    """What each ask wants to see predicted, by its identity; nothing is computed for others.

    Args:
        asks: of one step.
    """
    groups: dict[tuple[int, int], list[Decide]] = {}
    for ask in asks:
        if ask.predicting is not None:
            key = id(ask.predicting.scored.logits), ask.predicting.top
            groups.setdefault(key, []).append(ask)
    found: dict[int, PredictedRows] = {}
    for (_, top), sharing in groups.items():
        scored = [ask.predicting.scored for ask in sharing if ask.predicting is not None]
        logits = scored[0].logits
        rows = [row for own in scored for row in range(own.first, own.first + own.count)]
        if len(rows) < len(logits):
            index = torch.tensor(rows).to(logits.device, non_blocking=True)
            logits = logits.index_select(0, index)
        ids, weights = _likeliest(logits.float(), top)
        first = 0
        for ask, own in zip(sharing, scored, strict=True):
            found[id(ask)] = PredictedRows(ids, weights, first, own.count)
            first += own.count
    return found


def _likeliest(logits: Tensor, top: int) -> tuple[Tensor, Tensor | None]:
    """[R, K] likeliest tokens of logits [R, V], and their weights if there may be several."""
    if top == 1:
        return logits.max(-1, keepdim=True).indices.int(), None
    values, ids = logits.topk(min(top, logits.shape[1]))
    shares = (values - values[:, :1]).exp()
    # A row that is not finite gets no weight; its verdict says so, or it is a probe's.
    return ids.int(), shares.nan_to_num(0.0).mul(MAX_WEIGHT).round().int()


def on_host(
    predicted: PredictedRows, ids: npt.NDArray[np.int32], weights: npt.NDArray[np.int32] | None
) -> LikeliestRows:
    """An ask's rows, among those of its step.

    Args:
        predicted: the ask's.
        ids: of the step.
        weights: likewise.
    """
    own = slice(predicted.first, predicted.first + predicted.count)
    return LikeliestRows(ids[own], None if weights is None else weights[own])
