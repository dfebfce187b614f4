"""Predictions of a step: each text has those of its own rows, whoever shares its pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tandem.engine.answers import Scored
from tandem.engine.asks import Decide, Predicting
from tandem.engine.numbers.predictions import on_host, predict


def ask_of(scored: Scored | None, top: int) -> Decide:
    predicting = None if scored is None else Predicting(scored, top)
    return cast("Decide", SimpleNamespace(predicting=predicting))


@pytest.mark.parametrize("top", [1, 3])
def test_each_text_has_those_of_its_own_rows(top: int) -> None:
    """With rows of nobody between them, in any order, and another pass beside."""
    passes = [torch.randn(9, 7, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    places = [(0, 5, 2), (0, 0, 3), (1, 1, 4), (0, 8, 1)]
    scored = [Scored(passes[number], first, count) for number, first, count in places]
    asks = [ask_of(own, top) for own in scored]
    found = predict([ask_of(None, top), *asks])
    assert len(found) == len(asks)
    for ask, own in zip(asks, scored, strict=True):
        told = found[id(ask)]
        weights: Any = None if told.weights is None else told.weights.numpy()
        rows = on_host(told, told.ids.numpy(), weights)
        expected = own.logits[own.first : own.first + own.count].topk(top)
        assert rows.ids.tolist() == expected.indices.tolist()
        if top > 1:
            shares = (expected.values - expected.values[:, :1]).exp() * 65535
            assert rows.weights is not None
            assert rows.weights.tolist() == shares.round().int().tolist()
