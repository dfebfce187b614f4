"""The compiled kernels, compared with the plain code that they replace."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from numba import int64

from tandem.engine.answers import Decision, ScoredRows
from tandem.engine.asks import Decide
from tandem.engine.numbers import decisions
from tandem.engine.numbers.decisions import decide, decisions_of
from tandem.speculation import kernel as kernel_module
from tandem.speculation.categorical import Categorical
from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.speculation.randomness import VerdictNumbers
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.sampler import sample
from tandem.verification import VERIFIERS
from tandem.verification.block import BlockVerifier
from tandem.verification.kernels.chains import decide_all, decide_token

FUSED = [name for name, rule in VERIFIERS.items() if rule.kernel is not None]
STATEFUL = [name for name in FUSED if VERIFIERS[name].pack([None], 3).numel()]
ALMOST_ONE = 1 - 2.0**-53
_Rng = np.random.Generator


def rows_of(rng: _Rng, count: int, vocab_size: int, zeros: float) -> npt.NDArray[np.float32]:
    """Distributions with tokens of probability 0, and ties."""
    weights = rng.integers(1, 9, (count, vocab_size)) * rng.choice([1, 100], (count, vocab_size))
    weights[rng.random((count, vocab_size)) < zeros] = 0
    weights[np.arange(count), rng.integers(0, vocab_size, count)] = 500
    rows: npt.NDArray[np.float32] = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    return rows


def test_every_rule_has_a_kernel() -> None:
    assert sorted(FUSED) == sorted(VERIFIERS)


def test_a_rule_made_of_another_has_not_its_kernel() -> None:
    class Changed(BlockVerifier):
        """Decides otherwise, perhaps."""

    assert BlockVerifier().kernel is not None
    assert Changed().kernel is None


@pytest.mark.parametrize("support", [1, 3, 16, 512])
@pytest.mark.parametrize("mass", [0.001, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("vocab_size", [3, 50, 600])
def test_a_sample_is_bit_for_bit_the_plain_one(
    rng: _Rng, vocab_size: int, mass: float, support: int
) -> None:
    probs = rows_of(rng, 40, vocab_size, 0.3)
    probs[3] = np.nan
    digits = rng.integers(0, 2**32, (40, 2))
    digits[:2] = [[0, 0], [2**32 - 1, 2**32 - 1]]
    tokens, ids, weights = sample(probs, mass, support, digits)
    plain = Categorical.quantize(torch.from_numpy(probs), mass, support)
    drawn = plain.draw(torch.from_numpy(digits)).numpy()
    sound = np.arange(40) != 3
    np.testing.assert_array_equal(weights, plain.weights.numpy())
    np.testing.assert_array_equal(ids[sound], plain.ids.numpy()[sound])
    np.testing.assert_array_equal(tokens[sound], drawn[sound])
    assert not weights[3].any()


def test_a_token_begins_exactly_where_the_one_before_it_ends() -> None:
    """Two tokens of one weight share the 64-bit numbers in halves; random ones miss the border."""
    numbers = (0, 2**63 - 1, 2**63, 2**64 - 1)
    digits = np.array([[number & 0xFFFFFFFF, number >> 32] for number in numbers])
    tokens, _, _ = sample(np.full((4, 2), 0.5, np.float32), 1.0, 2, digits)
    assert tokens.tolist() == [0, 0, 1, 1]


def draft_of(rng: _Rng, gamma: int, vocab_size: int, *, whole: bool = False) -> Draft:
    """Rows that share few tokens with anything, some of them certain; or all of `whole` ones."""
    token_ids, sizes = [], []
    ids, weights = [np.empty(0, np.uint32)], [np.empty(0, np.uint16)]
    for _ in range(gamma):
        size = 0 if rng.random() < 0.2 else int(rng.integers(1, vocab_size + 1))
        size = vocab_size if whole else size
        row = rng.permutation(vocab_size)[: max(size, 1)]
        token_ids.append(int(rng.choice(row)))
        sizes.append(size)
        ids.append(row[:size].astype(np.uint32))
        weights.append(rng.integers(1, 65536, size).astype(np.uint16))
    return Draft(token_ids, sizes, np.concatenate(ids), np.concatenate(weights))


def received(draft: Draft) -> Draft:
    """The same as it comes off the wire: its arrays cannot be written to."""
    ids = np.frombuffer(draft.ids.tobytes(), "<u4")
    return Draft(draft.token_ids, draft.sizes, ids, np.frombuffer(draft.weights.tobytes(), "<u2"))


def decided(
    name: str, p: Any, starts: list[int], drafts: list[Draft], numbers: Any, carry: Any = None
) -> Any:
    """What a rule's kernel makes of drafts as they were received."""
    rule = VERIFIERS[name]
    assert rule.kernel is not None
    states = rule.pack(carry or [None] * len(drafts), numbers.shape[1] - 1).numpy()
    return decide_all(rule.kernel, p, starts, [received(d) for d in drafts], numbers, states)


def fused(name: str, p: Any, draft: Draft, numbers: Any) -> tuple[int, int, Any]:
    (out,) = all_of(name, p, draft, np.asarray(numbers)[None])
    return int(out[0]), int(out[1]), out[3 : 3 + len(draft)]


def all_of(name: str, p: Any, draft: Draft, numbers: Any) -> Any:
    """The verdicts of one draft for each row of numbers."""
    out = decided(name, p, [0] * len(numbers), [draft] * len(numbers), np.asarray(numbers))
    assert np.isfinite(out[:, 2]).all()
    return out


def state(name: str, levels: list[tuple[float, int]], gamma: int) -> Any:
    """Levels as a rule's state; a rule without any has none."""
    return VERIFIERS[name].carry_from(levels, gamma) if name in STATEFUL else None


def cases(rng: _Rng, count: int) -> Any:
    for _ in range(count):
        vocab_size, gamma = int(rng.integers(3, 9)), int(rng.integers(0, 6))
        yield rows_of(rng, gamma + 1, vocab_size, 0.3), draft_of(rng, gamma, vocab_size)


@pytest.mark.parametrize("name", FUSED)
def test_it_keeps_with_the_rules_own_probabilities(rng: _Rng, name: str) -> None:
    """Just below and just above each h, the others being rejected or accepted for certain."""
    rule = VERIFIERS[name]
    for p, draft in cases(rng, 150):
        gamma, asked, wanted = len(draft), [np.ones(len(draft) + 1) * 0.5], []
        target = torch.from_numpy(p)[None].double()
        proposal = Proposal.from_drafts([draft])
        chances = rule.accept_probabilities(proposal, target)[0].numpy()
        for place in range(gamma):
            for distance in (-1e-5, 1e-5):
                numbers = rng.random(gamma + 1)
                numbers[place] = np.clip(chances[place] + distance, 0, ALMOST_ONE)
                others = np.abs(numbers[:-1] - chances) > 1e-6
                if not others.all():
                    continue
                passed = torch.from_numpy(numbers[:-1] < chances)[None]
                asked.append(numbers)
                wanted.append(int(rule.count_accepted(passed)[0]))
        out = all_of(name, p, draft, asked)
        assert out[1:, 0].tolist() == wanted
        np.testing.assert_allclose(
            out[0, 3 : 3 + gamma], proposal.overlaps(target)[0].numpy(), atol=1e-6
        )


@pytest.mark.parametrize("name", FUSED)
def test_what_follows_has_the_law_of_the_residual(rng: _Rng, name: str) -> None:
    """Over a fine grid of the last number, for every number of kept tokens that occurs."""
    rule, grid = VERIFIERS[name], (np.arange(400) + 0.5) / 400
    for p, draft in cases(rng, 40):
        gamma, accepting = len(draft), rng.random(len(draft))
        numbers = [[*accepting, last] for last in (*grid, 0.0, ALMOST_ONE)]
        out = all_of(name, p, draft, numbers).astype(int)
        (kept,), tokens = set(out[:, 0].tolist()), out[:, 1]
        weights = rule.residual_weights(
            Proposal.from_drafts([draft]),
            torch.from_numpy(p)[None].double(),
            torch.tensor([kept]),
        )[0].numpy()
        found = np.bincount(tokens[: len(grid)], minlength=p.shape[1]) / len(grid)
        np.testing.assert_allclose(found, weights / weights.sum(), atol=2.1 / len(grid))
        for token in tokens[len(grid) :]:
            assert p[kept, token] > 0
            assert weights[token] > 0 or gamma == 0


def test_a_wrong_rule_is_caught(rng: _Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would see block decided as token is."""
    monkeypatch.setattr(type(VERIFIERS["block"]), "fused", staticmethod(decide_token))
    with pytest.raises(AssertionError):
        test_it_keeps_with_the_rules_own_probabilities(rng, "block")
    with pytest.raises(AssertionError):
        test_what_follows_has_the_law_of_the_residual(rng, "block")


@pytest.mark.parametrize("name", FUSED)
def test_drafts_of_many_lengths_share_a_call(rng: _Rng, name: str) -> None:
    """Each gets what it gets alone, and leaves the buffers as it found them."""
    vocab_size, longest = 7, 5
    drafts = [draft_of(rng, gamma, vocab_size) for gamma in (3, 0, 5, 1)]
    rows = [rows_of(rng, len(draft) + 1, vocab_size, 0.3) for draft in drafts]
    starts = np.cumsum([0, *map(len, rows[:-1])]).tolist()
    numbers = np.ones((len(drafts), longest + 1))
    alone = []
    for b, draft in enumerate(drafts):
        own = rng.random(len(draft) + 1)
        numbers[b, : len(draft)], numbers[b, -1] = own[:-1], own[-1]
        alone.append(fused(name, rows[b], draft, own))
    together = decided(name, np.concatenate(rows), starts, drafts, numbers)
    for out, (kept, token, overlaps) in zip(together, alone, strict=True):
        assert (out[0], out[1]) == (kept, token)
        np.testing.assert_array_equal(out[3 : 3 + len(overlaps)], overlaps)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("broken", [[0], [2], [3], [0, 1, 2, 3]])
def test_a_row_that_is_no_number_is_noticed(rng: _Rng, name: str, broken: list[int]) -> None:
    """And whoever shares its call does not notice."""
    p, drafts = rows_of(rng, 8, 6, 0.0), [draft_of(rng, 3, 6), draft_of(rng, 3, 6)]
    sound = p.copy()
    p[broken] = np.nan
    for levels in ([], [(0.5, 2), (-0.3, 2)]):
        carry = [state(name, levels, 3), state(name, levels, 3)]
        numbers = rng.random((2, 4))
        first, second = decided(name, p, [0, 4], drafts, numbers, carry)
        assert not np.isfinite(first[2])
        assert 0 <= first[0] <= 3
        assert 0 <= first[1] < 6
        np.testing.assert_array_equal(
            second, decided(name, sound, [0, 4], drafts, numbers, carry)[1]
        )


@pytest.mark.parametrize("name", FUSED)
def test_the_engine_decides_alike_with_and_without(
    rng: _Rng, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, vocab_size = VERIFIERS[name], 40
    drafts = [draft_of(rng, gamma, vocab_size) for gamma in (4, 4, 2, 0, 4)]
    carries: list[Any] = [None] * len(drafts)
    logits = torch.from_numpy(rng.normal(size=(19, vocab_size)).astype(np.float32) * 3)

    def verdicts(round_: int) -> list[Any]:
        first, asks = 0, []
        for seed, draft in enumerate(drafts):
            numbers = VerdictNumbers.of(seed)
            scored = ScoredRows(logits, first, len(draft) + 1)
            first += len(draft) + 1
            sampling = Sampling(temperature=0.9, top_k=30, seed=seed)
            asks.append(Decide(rule, draft, scored, sampling, carries[seed], numbers, round_))
        answers: Any = decide(asks)
        decisions = [one for one in decisions_of(answers) if isinstance(one, Decision)]
        carries[:] = [one.carry for one in decisions]
        return [(d.num_accepted, d.next_token, d.overlaps, d.levels) for d in decisions]

    calls = 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return decide_all(*arguments)

    monkeypatch.setattr(decisions, "decide_all", counted)
    compiled = [verdict for round_ in range(25) for verdict in verdicts(round_)]
    assert calls >= 50
    monkeypatch.setattr(type(rule), "fused", None)
    carries[:] = [None] * len(drafts)
    plain = [verdict for round_ in range(25) for verdict in verdicts(round_)]
    assert [one[:2] for one in compiled] == [one[:2] for one in plain]
    for one, other in zip(compiled, plain, strict=True):
        np.testing.assert_allclose(one[2], other[2], atol=1e-5)
        assert [count for _, count in one[3]] == [count for _, count in other[3]]
        np.testing.assert_allclose(one[3], other[3], atol=1e-3)
    assert any(one[3] for one in compiled) == (name in STATEFUL)


def test_without_a_place_for_the_cache_it_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jit = kernel_module._jit

    def refusing(function: Any, signature: Any, any_order: bool, cache: bool) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return jit(function, signature, any_order, cache)

    monkeypatch.setattr(kernel_module, "_jit", refusing)
    doubled = kernel_module.kernel(int64(int64))(lambda number: 2 * number)
    assert doubled(21) == 42
