"""Typical acceptance is what the paper's code does, written plainly; and it is lossy."""

from __future__ import annotations

import math
import random
import re
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.speculation.tree import DraftShape
from tandem.verification import LOSSY_VERIFIERS, VERIFIERS
from tandem.verification.lossy.typical import TypicalVerifier
from tests.support.laws.lossy import VOCAB_SIZE, law_of, random_rows, random_tables, random_tree

RULE = TypicalVerifier()


def plain(draft: Draft, p: Tensor, rule: TypicalVerifier) -> int:
    """The place of the longest path of typical tokens, the likeliest of several."""
    best, found = (0, 0.0), 0
    for place in range(1, len(draft) + 1):
        path = draft.path_to(place)
        before, log = 0, 0.0
        for step in path:
            row = p[before].tolist()
            entropy = -sum(share * math.log(share + 1e-5) for share in row)
            asked = min(rule.epsilon, rule.delta * math.exp(-entropy))
            share = row[draft.token_ids[step - 1]]
            if share <= asked:
                break
            log += math.log(share)
            before = step
        else:
            if (len(path), log) > best or not found:
                best, found = (len(path), log), place
    return found


@pytest.mark.parametrize("seed", range(4))
def test_it_keeps_what_a_plain_reading_keeps(seed: int) -> None:
    """A thousand trees of up to eight nodes, in batches, and chains among them."""
    rng, own = np.random.default_rng(seed), random.Random(seed)
    rule = TypicalVerifier(*[(0.09, 0.3), (0.3, 1.0), (0.02, 0.1), (0.0, 0.0)][seed])
    kept = []
    for _ in range(50):
        drafts = [random_tree(own, own.randint(1, 8)) for _ in range(5)]
        most = max(map(len, drafts))
        p = torch.stack([random_rows(rng, most + 1) for _ in drafts])
        verdict = rule.verify(
            Proposal.from_drafts(drafts), p, torch.from_numpy(rng.random((5, most + 1)))
        )
        expected = [plain(draft, rows, rule) for draft, rows in zip(drafts, p, strict=True)]
        assert verdict.place.tolist() == expected
        depths = [len(draft.path_to(place)) for draft, place in zip(drafts, expected, strict=True)]
        assert verdict.num_accepted.tolist() == depths
        for rows, place, token in zip(p, expected, verdict.next_token.tolist(), strict=True):
            assert rows[place, token] > 0
        kept += depths
    assert max(kept) >= 3
    assert min(kept) == 0


def test_chains_are_trees_without_siblings() -> None:
    rng = np.random.default_rng(7)
    drafts = [Draft.certain(rng.integers(VOCAB_SIZE, size=n).tolist()) for n in (3, 1, 4, 0, 2)]
    p = torch.stack([random_rows(rng, 5) for _ in drafts])
    uniforms = torch.from_numpy(rng.random((5, 5)))
    verdict = RULE.verify(Proposal.from_drafts(drafts), p, uniforms)
    assert verdict.place.tolist() == [
        plain(d, rows, RULE) for d, rows in zip(drafts, p, strict=True)
    ]
    proposal = Proposal.from_drafts(drafts)
    passed = RULE.accept_probabilities(proposal, p) > 0
    assert RULE.stop(proposal, passed).tolist() == verdict.place.tolist()
    assert torch.equal(
        RULE.residual_weights(proposal, p, verdict.place), p[torch.arange(5), verdict.place]
    )


def test_the_more_it_asks_the_nearer_is_the_law() -> None:
    """Distance of the law of four tokens from the target's: larger with a smaller epsilon."""
    tables = random_tables(np.random.default_rng(5), 7)
    own = {
        text: math.prod(float(tables[text[:i]][token]) for i, token in enumerate(text))
        for text in product(range(3), repeat=4)
    }

    def likely(text: tuple[int, ...]) -> Any:
        """The target's likeliest tokens, two at a time."""
        first = (1 + int(tables[text].argsort(descending=True)[1] == 0)) % 3
        yield Draft.certain([first, int(tables[(*text, first)].argmax())]), 1.0

    distances = []
    for epsilon in (0.0, 0.1, 0.25, 0.4, 1.0):
        law = law_of(TypicalVerifier(epsilon, 1.0), tables, likely, 4)
        assert sum(law.values()) == pytest.approx(1)
        distances.append(sum(abs(law.get(text, 0.0) - chance) for text, chance in own.items()) / 2)
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.3
    assert distances[-1] < distances[0] - 0.2


def test_options_have_names_and_bounds() -> None:
    assert RULE.with_options({}) is RULE
    assert RULE.with_options({"epsilon": 0.2}) == TypicalVerifier(0.2, 0.3)
    for values, sentence in (
        ({"epsilon": 1.5}, "epsilon must be 0..1, got 1.5"),
        ({"epsilon": math.nan}, "epsilon must be 0..1, got nan"),
        ({"gamma": 1.0}, "gamma is no option of lossy_typical: ['epsilon', 'delta']"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            RULE.with_options(values)
    with pytest.raises(ValueError, match="epsilon is no option of block"):
        VERIFIERS["block"].with_options({"epsilon": 0.1})


def test_it_says_that_it_is_lossy() -> None:
    assert not set(LOSSY_VERIFIERS) & set(VERIFIERS)
    for name, rule in LOSSY_VERIFIERS.items():
        assert name.startswith("lossy_")
        assert not rule.lossless
        assert rule.takes is DraftShape.TREE
        assert rule.suits(DraftShape.IID_CHAINS, pure=False)
