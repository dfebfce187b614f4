"""A text's own random numbers leave its law as it is: none serves two purposes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.answers import Decision, ScoredRows
from tandem.engine.asks import Decide
from tandem.engine.numbers.decisions import decide, decisions_of
from tandem.speculation.categorical import Categorical
from tandem.speculation.draft import Draft
from tandem.speculation.randomness import Purpose, RandomNumbers, digits
from tandem.speculation.request.sampling import Sampling
from tandem.verification import VERIFIERS
from target_svc.round import TargetRequest, TargetSequence
from tests.support.laws.laws import chi_square_p_value

TARGET = torch.tensor([0.4, 0.3, 0.2, 0.1])
DRAFTER = torch.tensor([0.2, 0.25, 0.25, 0.3])
TEXTS = 2500


@pytest.mark.parametrize("rule", ["block", "token"])
def test_the_first_token_follows_the_targets_law(rule: str) -> None:
    """Over seeds, with the numbers that drafter and target take for them."""
    logits = TARGET.log().repeat(2 * TEXTS, 1)
    row = Categorical.quantize(DRAFTER[None], 1.0, 0)
    ids, weights = row.ids[0].numpy().astype(np.uint32), row.weights[0].numpy().astype(np.uint16)
    asks, drafted = [], []
    for seed in range(TEXTS):
        sampling = Sampling(seed=seed)
        sequence = TargetSequence([1], TargetRequest(sampling, VERIFIERS[rule]))
        numbers = torch.from_numpy(RandomNumbers(seed, Purpose.DRAFT, digits).take(1, 1))
        token = int(row.draw(numbers)[0])
        asks.append(
            Decide(
                rule=sequence.request.rule,
                draft=Draft([token], [len(ids)], ids, weights),
                scored=ScoredRows(logits, 2 * seed, 2),
                sampling=sampling,
                carry=None,
                numbers=sequence.numbers,
                round=1,
            )
        )
        drafted.append(token)
    answers: Any = decide(asks)
    counts, kept = np.zeros(len(TARGET)), 0
    for token, decision in zip(drafted, decisions_of(answers), strict=True):
        assert isinstance(decision, Decision)
        counts[token if decision.num_accepted else decision.next_token] += 1
        kept += decision.num_accepted
    assert 0.5 * TEXTS < kept < 0.9 * TEXTS
    assert chi_square_p_value(counts, TARGET.numpy()) > 1e-4
