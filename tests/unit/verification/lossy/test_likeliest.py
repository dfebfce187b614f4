"""SpecDec's and BiLD's rules are what the papers say, written plainly; and they are lossy."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.verification import LOSSY_VERIFIERS, VERIFIERS, Verifier
from tandem.verification.lossy.fallback import FallbackVerifier
from tandem.verification.lossy.likeliest import LikeliestBehind
from tandem.verification.lossy.topk_gap import TopkGapVerifier
from tests.support.laws.lossy import VOCAB_SIZE, law_of, random_rows, random_tables, random_tree

Row = list[float]


def order(row: Row) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def near(row: Row, token: int, beta: float, tau: float) -> bool:
    if row[token] == 0 or order(row).index(token) + 1 > beta:
        return False
    return math.log(max(row)) - math.log(row[token]) <= tau


def unsurprising(row: Row, token: int, alpha: float) -> bool:
    return order(row)[0] == token or (row[token] > 0 and -math.log(row[token]) <= alpha)


CASES = [
    (TopkGapVerifier(*options), near, options)
    for options in ((3.0, 1.0), (1.0, 1.0), (2.0, 100.0), (6.0, 0.5))
] + [(FallbackVerifier(alpha), unsurprising, (alpha,)) for alpha in (3.0, 1.0, 0.0)]

IDS = [str(case[0]) for case in CASES]


def plain(draft: Draft, p: Tensor, good: Any, options: tuple[float, ...]) -> int:
    """From the root on, the first child that is good."""
    place = 0
    while True:
        children = [n for n, at in enumerate(draft.places()) if at == place]
        row = p[place].tolist()
        found = [n for n in children if good(row, draft.token_ids[n], *options)]
        if not found:
            return place
        place = found[0] + 1


@pytest.mark.parametrize(("rule", "good", "options"), CASES, ids=IDS)
def test_they_keep_what_a_plain_reading_keeps(
    rule: LikeliestBehind, good: Any, options: tuple[float, ...]
) -> None:
    """500 trees of up to eight nodes, in batches; after them comes the likeliest token."""
    rng, own = np.random.default_rng(1), random.Random(1)
    kept = []
    for _ in range(100):
        drafts = [random_tree(own, own.randint(1, 8)) for _ in range(5)]
        most = max(map(len, drafts))
        p = torch.stack([random_rows(rng, most + 1) for _ in drafts])
        uniforms = torch.from_numpy(rng.random((5, most + 1)))
        verdict = rule.verify(Proposal.from_drafts(drafts), p, uniforms)
        expected = [
            plain(draft, rows, good, options) for draft, rows in zip(drafts, p, strict=True)
        ]
        assert verdict.place.tolist() == expected
        behind = [order(rows[at].tolist())[0] for rows, at in zip(p, expected, strict=True)]
        assert verdict.next_token.tolist() == behind
        kept += verdict.num_accepted.tolist()
    assert max(kept) >= 2
    assert min(kept) == 0


@pytest.mark.parametrize("rule", [case[0] for case in CASES], ids=IDS)
def test_chains_are_trees_without_siblings(rule: LikeliestBehind) -> None:
    rng = np.random.default_rng(7)
    drafts = [Draft.certain(rng.integers(VOCAB_SIZE, size=n).tolist()) for n in (3, 1, 4, 0, 2)]
    p = torch.stack([random_rows(rng, 5) for _ in drafts])
    proposal = Proposal.from_drafts(drafts)
    verdict = rule.verify(proposal, p, torch.from_numpy(rng.random((5, 5))))
    passed = rule.accept_probabilities(proposal, p) > 0
    assert rule.stop(proposal, passed).tolist() == verdict.place.tolist()
    weights = rule.residual_weights(proposal, p, verdict.place)
    assert weights.argmax(-1).tolist() == verdict.next_token.tolist()


@pytest.mark.parametrize("rule", [*LOSSY_VERIFIERS.values(), TopkGapVerifier(6.0, 0.5)], ids=str)
def test_at_temperature_0_all_lossy_rules_are_greedy(rule: Verifier[Any]) -> None:
    """Rows of one token: what is kept is the target's own text."""
    rng, own = np.random.default_rng(3), random.Random(3)
    for _ in range(100):
        draft = random_tree(own, 6)
        p = torch.nn.functional.one_hot(torch.from_numpy(rng.integers(6, size=7)), VOCAB_SIZE)
        rows, numbers = p[None].double(), torch.from_numpy(rng.random((1, 7)))
        proposal = Proposal.from_drafts([draft])
        mine, token = (r.verify(proposal, rows, numbers) for r in (rule, VERIFIERS["token"]))
        assert mine.place.tolist() == token.place.tolist()
        assert mine.next_token.tolist() == token.next_token.tolist()


def test_the_more_is_kept_the_farther_is_the_greedy_text() -> None:
    """Three tokens, drafts of two that are drawn: how likely the text is not the greedy one.
    It is 0 where only the likeliest token passes, and grows with each option."""
    rng = np.random.default_rng(5)
    tables, drafter = random_tables(rng, 6), random_tables(rng, 6)

    def sampled(text: tuple[int, ...]) -> Any:
        for first, second in product(range(3), repeat=2):
            chance = drafter[text][first] * drafter[(*text, first)][second]
            yield Draft.certain([first, second]), float(chance)

    greedy: tuple[int, ...] = ()
    for _ in range(3):
        greedy = (*greedy, int(tables[greedy].argmax()))

    def distance(rule: LikeliestBehind) -> float:
        law = law_of(rule, tables, sampled, 3)
        assert sum(law.values()) == pytest.approx(1)
        return 1 - law.get(greedy, 0.0)

    for walk in (
        [TopkGapVerifier(beta, 100.0) for beta in (1.0, 2.0, 3.0)],
        [TopkGapVerifier(3.0, tau) for tau in (0.0, 0.6, 100.0)],
        [FallbackVerifier(alpha) for alpha in (0.0, 1.0, 100.0)],
    ):
        distances = [distance(rule) for rule in walk]
        assert distances[0] == pytest.approx(0)
        assert distances == sorted(distances)
        assert distances[-1] > 0.5
        assert len({round(one, 6) for one in distances}) >= 3
