"""Predictions of a step: each text has those of its own rows, whoever shares its pass."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tandem.engine.answers import ScoredRows
from tandem.engine.asks import Decide
from tandem.engine.numbers.feedback import feedback_of, predicted
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import FeedbackWanted
from tandem.speculation.probes import Probes


def ask_of(scored: ScoredRows | None, top: int) -> Decide:
    """Of the last token, and of probes after it in the pass."""
    wanted = None if scored is None else FeedbackWanted(top=top, everywhere=True)
    probes = 0 if scored is None else scored.count - 1
    draft = replace(Draft.certain(()), probes=Probes((0,) * probes, (0,) * probes))
    alone = scored and replace(scored, count=1)
    ask = SimpleNamespace(draft=draft, feedback=wanted, scored=alone, round=1, position=0)
    return cast("Decide", ask)


@pytest.mark.parametrize("top", [1, 3])
def test_each_text_has_those_of_its_own_rows(top: int) -> None:
    """With rows of nobody between them, in any order, and another pass beside."""
    passes = [torch.randn(9, 7, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    places = [(0, 5, 2), (0, 0, 3), (1, 1, 4), (0, 8, 1)]
    scored = [ScoredRows(passes[number], first, count) for number, first, count in places]
    asks = [ask_of(own, top) for own in scored]
    found = feedback_of([ask_of(None, top), *asks])
    assert len(found) == len(asks)
    for ask, own in zip(asks, scored, strict=True):
        told = found[id(ask)]
        assert isinstance(ask.draft, Draft)
        likeliest = [part.numpy()[told.first :] for part in told.rows]
        rows = predicted(told.wanted, ask.draft, 0, *likeliest)
        expected = own.logits[own.first : own.first + own.count].topk(top)
        assert [row.ids.tolist() for row in rows.values()] == expected.indices.tolist()
        if top > 1:
            shares = (expected.values - expected.values[:, :1]).exp() * 65535
            kept = [row.weights.tolist() for row in rows.values()]
            assert kept == shares.round().int().tolist()
            every = own.logits[own.first : own.first + own.count].softmax(-1)
            masses = every.gather(-1, expected.indices).sum(-1) * 65535
            assert [row.mass for row in rows.values()] == masses.round().int().tolist()
