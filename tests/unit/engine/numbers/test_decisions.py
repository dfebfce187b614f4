"""A rule, perhaps another package's, whose weights for the next token are no numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.engine.answers import Decision, ScoredRows
from tandem.engine.asks import Decide
from tandem.engine.numbers.decisions import decide, decisions_of
from tandem.errors import EngineFailure
from tandem.speculation.draft import Draft
from tandem.speculation.request.sampling import Sampling
from tandem.verification.token import TokenVerifier
from target_svc.round import TargetRequest, TargetSequence

V = 4
BROKEN = 1  # of three texts of a batch


def decided(rule: TokenVerifier, broken_logits: float = 0.0) -> list[str]:
    """What is said of three texts, whose batch is decided at once."""
    logits = torch.zeros(6, V)
    logits[2 * BROKEN] = broken_logits
    asks = []
    for text in range(3):
        sampling = Sampling(seed=text)
        sequence = TargetSequence([1], TargetRequest(sampling, rule))
        ids, weights = np.arange(V, dtype=np.uint32), np.full(V, 9, np.uint16)
        asks.append(
            Decide(
                rule=rule,
                draft=Draft([2], [V], ids, weights),
                scored=ScoredRows(logits, 2 * text, 2),
                sampling=sampling,
                carry=None,
                numbers=sequence.numbers,
                round=1,
            )
        )
    answers: Any = decide(asks)
    found = []
    for one in decisions_of(answers):
        if isinstance(one, Decision):
            assert 0 <= one.next_token < V
        else:
            assert isinstance(one, EngineFailure)
        found.append("" if isinstance(one, Decision) else str(one))
    return found


class Mine(TokenVerifier):
    """Of an outside package.

    Args:
        weight: of a token that may follow the broken text's draft.
    """

    name = "mine"

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def _residual(self, view: Any, num_accepted: Tensor) -> Tensor:
        found = super()._residual(view, num_accepted).clone()
        found[BROKEN, 0] = self.weight
        return found


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_its_text_ends_with_an_error_that_names_it_and_others_go_on(weight: float) -> None:
    sentence = "the rule mine gave weights that are not finite for the next token"
    assert decided(Mine(weight)) == ["", sentence, ""]
    assert decided(Mine(0.5)) == [""] * 3


def test_it_is_not_blamed_for_the_targets_row() -> None:
    said = decided(Mine(math.nan), broken_logits=math.nan)
    assert said == ["", "the target computed a distribution that is not finite", ""]
