"""The rules are lossless: exact enumeration of the production code, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal, Verdict
from tandem.verification import VERIFIERS, Verifier
from tandem.verification.block import BlockVerifier
from tandem.verification.chain import row_at, up_to_first_failure
from tandem.verification.greedy_block import GreedyBlockVerifier
from tandem.verification.ratios import ratios
from tandem.verification.token import TokenVerifier
from tests.support.laws.laws import Tables, expected_accepted, speculative_law

SEEDS = range(20)
TOLERANCE = 1e-12


@cache  # every rule decides the same drafts
def tables_of(vocab_size: int, longest: int, seeds: Sequence[int]) -> Tables:
    return Tables.of_seeds(vocab_size, longest, seeds)


def law_error(rule: Verifier[Any], vocab_size: int, gamma: int, seeds: Sequence[int]) -> float:
    length = 4 if vocab_size == 4 else 5
    tables = tables_of(vocab_size, length + gamma, seeds)
    law = speculative_law(rule, tables, gamma, length)
    return float((law - tables.autoregressive_law(length)).abs().max())


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("vocab_size", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_law_equals_the_targets(name: str, vocab_size: int, gamma: int) -> None:
    assert law_error(VERIFIERS[name], vocab_size, gamma, SEEDS) < TOLERANCE


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_law_holds_where_the_end_cuts_drafts_short(name: str) -> None:
    tables = tables_of(3, 8, range(6))
    for length in (3, 4):
        law = speculative_law(VERIFIERS[name], tables, 3, length, capped=True)
        assert float((law - tables.autoregressive_law(length)).abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", ["token", "block"])
def test_law_holds_for_certain_drafts(name: str) -> None:
    """As of a lookup: a token that was not drawn, whatever it is, with a row all its own."""
    tables = tables_of(3, 8, range(6))
    certain = torch.nn.functional.one_hot(tables.q.argmax(-1), 3).double()
    tables = replace(tables, q=certain)
    law = speculative_law(VERIFIERS[name], tables, 3, 5)
    assert float((law - tables.autoregressive_law(5)).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "expected"),
    [("token", Fraction(10, 9)), ("block", Fraction(11, 9)), ("greedy_block", Fraction(12, 9))],
)
def test_expected_accepted_on_the_papers_toy(name: str, expected: Fraction) -> None:
    rows = torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float64).expand(15, 2)
    tables = Tables(2, rows, rows.flip(-1))
    assert expected_accepted(VERIFIERS[name], tables, 2) == pytest.approx(float(expected))


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("vocab_size", [2, 3, 4])
def test_block_accepts_at_least_as_much_as_token(vocab_size: int, gamma: int) -> None:
    for seed in SEEDS:
        tables = Tables.random(vocab_size, gamma + 1, seed, zeros=seed % 2 == 0)
        token, block, greedy = (
            expected_accepted(VERIFIERS[name], tables, gamma)
            for name in ("token", "block", "greedy_block")
        )
        assert token <= block + TOLERANCE
        assert block <= greedy + TOLERANCE


class FirstFailureStops(BlockVerifier):
    def count_accepted(self, passed: Tensor) -> Tensor:
        return up_to_first_failure(passed)


class TokenResidualInBlock(BlockVerifier):
    def residual_weights(
        self,
        proposal: Proposal,
        target_probs: Tensor,
        place: Tensor,
        carry: Sequence[Any] | None = None,
    ) -> Tensor:
        return TokenVerifier().residual_weights(proposal, target_probs, place, carry)


class NewestModificationOnly(GreedyBlockVerifier):
    def next_carry(self, proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> list[Any]:
        carries = super().next_carry(proposal, target_probs, verdict)
        newest = [max((i for i, n in enumerate(c[1]) if n), default=0) for c in carries]
        for carry, last in zip(carries, newest, strict=True):
            carry[1, :last] = 0
        return carries


class BonusFromTheWrongRow(BlockVerifier):
    def residual_weights(
        self,
        proposal: Proposal,
        target_probs: Tensor,
        place: Tensor,
        carry: Sequence[Any] | None = None,
    ) -> Tensor:
        weights = super().residual_weights(proposal, target_probs, place, carry)
        wrong = row_at(target_probs, (place - 1).clamp(min=0))
        return torch.where((place == proposal.lengths)[:, None], wrong, weights)


@pytest.mark.parametrize(
    ("mutant", "vocab_size"),
    [
        (FirstFailureStops(), 3),
        (TokenResidualInBlock(), 3),
        (NewestModificationOnly(), 3),
        (BonusFromTheWrongRow(), 3),
    ],
)
def test_enumeration_catches(mutant: Verifier[Any], vocab_size: int) -> None:
    assert law_error(mutant, vocab_size, 3, range(1, 8, 2)) > 1e-4


def test_enumeration_catches_an_inverted_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.verification.chain.ratios", lambda p, q: ratios(q, p))
    assert law_error(TokenVerifier(), 3, 3, range(1, 2)) > 1e-3


def test_a_two_token_vocabulary_cannot_catch_the_token_residual() -> None:
    """Why V >= 3: at V = 2 both residuals are the same point mass."""
    assert law_error(TokenResidualInBlock(), 2, 3, range(1, 2)) < TOLERANCE
