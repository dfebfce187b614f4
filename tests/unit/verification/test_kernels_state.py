"""Kernels of rules with a state: round after round, against the plain rule in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal, Verdict
from tandem.verification import VERIFIERS
from tandem.verification.kernels.chains import decide_all
from tests.support.laws.laws import Tables, speculative_law
from tests.unit.verification.test_kernels import STATEFUL, decided, draft_of, rows_of, state

_Rng = np.random.Generator
# A bisection's steps, and the law of texts that it leaves.
STEPS, TOLERANCE = 24, 2e-6


def proposal_of(drafts: list[Draft]) -> Proposal:
    """With the probabilities that rules get to see, which are float32."""
    proposal = Proposal.from_drafts(drafts)
    probs = proposal.probs.float().double()
    return Proposal(proposal.tokens, proposal.lengths, proposal.ids, probs)


def stacked(rows: list[npt.NDArray[np.float32]], gamma: int) -> torch.Tensor:
    """[B, G+1, V] float64, zeros after a shorter draft's rows."""
    target = np.zeros((len(rows), gamma + 1, rows[0].shape[1]))
    for one, own in zip(target, rows, strict=True):
        one[: len(own)] = own
    return torch.from_numpy(target)


def rows_near(rng: _Rng, draft: Draft, vocab_size: int) -> npt.NDArray[np.float32]:
    """A target's rows that resemble a draft's more or less, down to the same."""
    rows = rows_of(rng, len(draft) + 1, vocab_size, float(rng.choice([0.0, 0.3])))
    likeness = rng.choice([0.0, 0.0, 0.0, 0.1, 0.5, 0.9, 0.999, 1.0])
    if len(draft):
        q = proposal_of([draft]).dense(vocab_size, torch.float32)[0].numpy()
        rows[:-1] = likeness * q + (1 - likeness) * rows[:-1]
    return rows


def compare_decodings(rng: _Rng, name: str, texts: int) -> int:
    """Batches of texts, round after round, each handing its own state on; the most levels."""
    rule, deepest = VERIFIERS[name], 0
    for _ in range(texts):
        vocab_size, full, batch = int(rng.integers(3, 12)), int(rng.integers(1, 17)), 5
        ours, theirs = [None] * batch, [None] * batch
        # Levels pile up where q has all tokens, and where few are kept.
        whole, power = rng.random() < 0.5, rng.choice([1.0, 0.01])
        for _ in range(6):
            gammas = [full if rng.random() < 0.9 else int(rng.integers(full)) for _ in ours]
            gamma = max(gammas)
            drafts = [draft_of(rng, length, vocab_size, whole=whole) for length in gammas]
            rows = [rows_near(rng, draft, vocab_size) for draft in drafts]
            starts = np.cumsum([0, *map(len, rows[:-1])]).tolist()
            numbers = rng.random((batch, gamma + 1)) ** power
            out = decided(name, np.concatenate(rows), starts, drafts, numbers, ours)
            proposal, target = proposal_of(drafts), stacked(rows, gamma)
            verdict = rule.verify(proposal, target, torch.from_numpy(numbers), theirs)
            expected = rule.pack(verdict.carry, gamma)
            packed = torch.from_numpy(out[:, 3 + gamma :])
            assert np.isfinite(out[:, 2]).all()
            np.testing.assert_array_equal(out[:, 0], verdict.num_accepted)
            np.testing.assert_array_equal(out[:, 1], verdict.next_token)
            np.testing.assert_allclose(packed, expected, atol=1e-9)
            overlaps = proposal.overlaps(target)
            np.testing.assert_allclose(out[:, 3 : 3 + gamma], overlaps, atol=1e-6)
            ours, theirs = rule.unpack(packed), verdict.carry
            deepest = max(deepest, *(len(rule.levels_of(one)) for one in packed.tolist()))
    return deepest


@pytest.mark.parametrize("name", STATEFUL)
def test_rounds_are_decided_alike(rng: _Rng, name: str) -> None:
    assert compare_decodings(rng, name, 15) >= 4


@pytest.mark.parametrize("name", STATEFUL)
def test_a_deep_stack_of_levels_is_decided_alike(rng: _Rng, name: str) -> None:
    """Ratios beyond 1, as emitted tokens leave them; more levels than there can be do not fit."""
    rule = VERIFIERS[name]
    for _ in range(30):
        vocab_size, gamma = int(rng.integers(3, 9)), int(rng.integers(2, 17))
        batch = range(5)
        levels = [
            [
                (0.01 + float(rng.choice([0.1, 1.0, 40.0]) * rng.random()), int(length))
                for length in rng.integers(1, gamma, rng.integers(gamma))
            ]
            for _ in batch
        ]
        carry = [state(name, one, gamma) for one in levels]
        drafts = [draft_of(rng, gamma, vocab_size) for _ in batch]
        rows = [rows_near(rng, draft, vocab_size) for draft in drafts]
        starts, numbers = [b * (gamma + 1) for b in batch], rng.random((len(batch), gamma + 1))
        out = decided(name, np.concatenate(rows), starts, drafts, numbers, carry)
        target = stacked(rows, gamma)
        verdict = rule.verify(proposal_of(drafts), target, torch.from_numpy(numbers), carry)
        np.testing.assert_array_equal(out[:, 0], verdict.num_accepted)
        np.testing.assert_array_equal(out[:, 1], verdict.next_token)
        expected = rule.pack(verdict.carry, gamma)
        np.testing.assert_allclose(out[:, 3 + gamma :], expected, atol=1e-6)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("log_ratio", [-41.4, 0.0, 41.4])
def test_levels_that_leave_nothing_are_survived(rng: _Rng, name: str, log_ratio: float) -> None:
    """No target returns such, but a client may."""
    gamma, vocab_size = 4, 5
    for _ in range(50):
        carry = state(name, [(log_ratio, 3)] * 3, gamma)
        draft = draft_of(rng, gamma, vocab_size)
        rows, numbers = rows_near(rng, draft, vocab_size), rng.random((1, gamma + 1))
        (out,) = decided(name, rows, [0], [draft], numbers, [carry])
        assert np.isfinite(out).all()
        assert 0 <= out[0] <= gamma
        assert rows[int(out[0]), int(out[1])] > 0
        left = VERIFIERS[name].levels_of(out[3 + gamma :].tolist())
        assert state(name, left, gamma) is not None or not left


class Measured:
    """A rule as its kernel shows it: probabilities by bisection of the numbers that decide.

    For a rule whose last success counts, so that a row passes alone where all others fail.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rule = VERIFIERS[name]
        self.count_accepted = self.rule.count_accepted
        self._written: tuple[Proposal | None, list[Draft]] = None, []

    def accept_probabilities(self, proposal: Proposal, target: Any, carry: Any) -> torch.Tensor:
        batch, gamma = proposal.tokens.shape
        places = np.arange(gamma)

        def below(points: npt.NDArray[np.float64]) -> Any:
            numbers = np.ones((batch, gamma, gamma + 1))
            numbers[:, places, places] = points
            return self._decided(proposal, target, carry, numbers)[..., 0] == places + 1

        return torch.from_numpy(_bisected(below, (batch, gamma)))

    def residual_weights(self, proposal: Proposal, target: Any, kept: Any, carry: Any) -> Any:
        batch, vocab_size = proposal.tokens.shape[0], target.shape[-1]
        tokens = np.arange(vocab_size - 1)

        def below(points: npt.NDArray[np.float64]) -> Any:
            numbers = self._keeping(kept, vocab_size - 1)
            numbers[..., -1] = points
            return self._decided(proposal, target, carry, numbers)[..., 1] <= tokens

        reached = _bisected(below, (batch, vocab_size - 1))
        return torch.from_numpy(np.diff(reached, prepend=0.0, append=1.0))

    def next_carry(self, proposal: Proposal, target: Any, verdict: Verdict) -> list[Any]:
        kept, carry = verdict.num_accepted, verdict.carry
        law = self.residual_weights(proposal, target, kept, carry)
        place = verdict.next_token[:, None]
        numbers = self._keeping(kept, 1)
        numbers[:, :, -1] = law.cumsum(1).gather(1, place) - law.gather(1, place) / 2
        out = self._decided(proposal, target, carry, numbers)[:, 0]
        np.testing.assert_array_equal(out[:, 0], kept)
        np.testing.assert_array_equal(out[:, 1], verdict.next_token)
        return self.rule.unpack(torch.from_numpy(out[:, 3 + proposal.tokens.shape[1] :]))

    def _keeping(self, kept: Any, copies: int) -> npt.NDArray[np.float64]:
        """Numbers [B, copies, G+1] with which so many tokens are kept, where they can be."""
        numbers = np.ones((len(kept), copies, GAMMA + 1))
        some = np.flatnonzero(kept)
        numbers[some, :, kept[some] - 1] = 0.0
        return numbers

    def _decided(self, proposal: Proposal, target: Any, carry: Any, numbers: Any) -> Any:
        """[B, N, ...]: each draft's verdicts for numbers [B, N, G+1]."""
        batch, copies, width = numbers.shape
        if proposal is not self._written[0]:
            self._written = proposal, _drafts(proposal)
        drafts = [draft for draft in self._written[1] for _ in range(copies)]
        starts = np.repeat(np.arange(batch) * width, copies).tolist()
        states = self.rule.pack(carry, width - 1).numpy().repeat(copies, 0)
        rows, flat = target.float().flatten(0, 1).numpy(), numbers.reshape(-1, width)
        assert self.rule.kernel is not None
        out = decide_all(self.rule.kernel, rows, starts, drafts, flat, states)
        return out.reshape(batch, copies, -1)


def _bisected(
    below: Callable[[npt.NDArray[np.float64]], Any], shape: tuple[int, ...]
) -> npt.NDArray[np.float64]:
    """Where in [0, 1] each of `below` turns from true to false."""
    low, high = np.zeros(shape), np.ones(shape)
    for _ in range(STEPS):
        middle = (low + high) / 2
        inside = below(middle)
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return np.round((low + high) / 2, 7)  # what cannot be has no probability at all


# Drafts that can be written down as weights: q is a number of these parts.
PARTS, GAMMA, LENGTH, VOCAB_SIZE = 64, 3, 3, 3


def _drafts(proposal: Proposal) -> list[Draft]:
    weights = np.rint(proposal.probs.numpy() * PARTS).astype(np.uint16)
    drafts = []
    for tokens, rows in zip(proposal.tokens.tolist(), weights, strict=True):
        ids = np.concatenate([np.flatnonzero(row) for row in rows]).astype(np.uint32)
        drafts.append(Draft(tokens, (rows > 0).sum(1).tolist(), ids, rows[rows > 0]))
    return drafts


def law_error(name: str, seed: int) -> float:
    """Of whole texts, enumerated, each round of them decided by the kernel."""
    tables = Tables.random(VOCAB_SIZE, LENGTH + GAMMA, seed, zeros=seed % 2 == 0)
    rng = np.random.default_rng(seed)
    q = torch.from_numpy(rng.multinomial(PARTS, tables.q.numpy()) / PARTS)
    tables = Tables(VOCAB_SIZE, tables.p.float().double(), q)
    measured: Any = Measured(name)
    law = speculative_law(measured, tables, GAMMA, LENGTH)
    return float((law - tables.autoregressive_law(LENGTH)).abs().max())


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("seed", range(3))
def test_the_law_of_texts_is_the_targets(name: str, seed: int) -> None:
    assert law_error(name, seed) < TOLERANCE


def levels_forgotten(before: Any, after: Any) -> None:
    after[:] = 0.0


def levels_not_moved_on(before: Any, after: Any) -> None:
    after[:] = before


def newest_level_only(before: Any, after: Any) -> None:
    counts = after[len(after) // 2 :]
    counts[: max(int(np.count_nonzero(counts)) - 1, 0)] = 0.0


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("change", [levels_forgotten, levels_not_moved_on, newest_level_only])
def test_a_wrong_state_is_caught(
    rng: _Rng, name: str, change: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = VERIFIERS[name].kernel
    assert kernel is not None

    def mutant(*arguments: Any) -> None:
        own = arguments[-2]
        before = own.copy()
        kernel(*arguments)
        change(before, own)

    monkeypatch.setattr(type(VERIFIERS[name]), "fused", staticmethod(mutant))
    with pytest.raises(AssertionError):
        compare_decodings(rng, name, 15)
    assert law_error(name, 1) > 1e-3
