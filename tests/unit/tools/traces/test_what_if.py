"""Predictions from recordings, checked against known outcomes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tandem.failure import Failure
from tandem.tools.traces.analysis.batches import PassWaits
from tandem.tools.traces.prediction.basis import Basis
from tandem.tools.traces.prediction.costs import Curve, batch_curve
from tandem.tools.traces.prediction.speculation import RatioModel, continued, kept
from tandem.tools.traces.prediction.whatif import Outlook, PredictedChange
from tandem.tools.traces.read.recording import Recording
from tests.support.traces import COSTS, Costs, Tape, recorded, request, request_ms


def rounds(gamma: int, count: int, keep: float, seed: int) -> list[tuple[int, int]]:
    """Rounds of a drafter whose tokens are each kept with one probability."""
    numbers = random.Random(seed)

    def accepted() -> int:
        return next((i for i in range(gamma) if numbers.random() > keep), gamma)

    return [(gamma, accepted()) for _ in range(count)]


def outlook(path: Path, verifier: str | None = None, gamma: int | None = None) -> Outlook:
    return Outlook(Basis(Recording([str(path)]), verifier, gamma))


def measured(texts: list[tuple[int, int]], costs: Costs = COSTS) -> float:
    """Tokens a second of a request that is `texts`."""
    return (1 + sum(a + 1 for _, a in texts)) / request_ms(texts, costs) * 1e3


def change(found: Outlook, name: str) -> PredictedChange:
    (one,) = [change for change in found.changes if change.change == name]
    return one


def tokens_per_s(found: Outlook, gamma: int, verifier: str = "token") -> float:
    (row,) = [r for r in found.gammas if (r.gamma, r.verifier) == (gamma, verifier)]
    return row.tokens_per_s


def test_another_gamma_is_what_it_then_is(tmp_path: Path) -> None:
    """Drafting takes gamma times as long here, but for its queue; verifying does not."""
    base = rounds(4, 800, 0.8, seed=1)
    found = outlook(recorded(tmp_path / "g4.jsonl", 1, base, verifier="token"))
    assert found.tokens_per_s == pytest.approx(measured(base))
    assert tokens_per_s(found, 4) == pytest.approx(measured(base))
    for gamma in (1, 2, 8):
        # The same text: as many tokens, of as many rounds as those make.
        tokens = np.cumsum([a + 1 for _, a in rounds(gamma, 1_800, 0.8, seed=2)])
        count = int(np.searchsorted(tokens, sum(a + 1 for _, a in base), side="right"))
        other = rounds(gamma, 1_800, 0.8, seed=2)[:count]
        assert tokens_per_s(found, gamma) == pytest.approx(measured(other), rel=0.04)


def test_a_steep_line_through_neighbouring_lengths_makes_no_round_too_short(tmp_path: Path) -> None:
    tape = Tape()
    at = 0.0
    for trace in range(1, 41):
        gamma = (3, 4)[trace % 2]
        costs = replace(COSTS, verify_pass=COSTS.verify_pass * (1 if gamma == 3 else 3))
        texts = rounds(gamma, 10, 0.8, seed=trace)
        request(tape, texts, trace=trace, start=at, costs=costs, verifier="token")
        at += request_ms(texts, costs)
    found = outlook(tape.write(tmp_path / "steep.jsonl"), gamma=4)
    row = next(r for r in found.gammas if r.gamma == 1)
    assert row.round_ms > COSTS.verify_pass


def test_times_at_other_gammas_come_from_rounds_that_have_them(tmp_path: Path) -> None:
    """A target whose pass grows with its rows, recorded at two lengths."""
    tape = Tape()
    at = 0.0
    for trace in range(1, 41):
        gamma = (2, 8)[trace % 2]
        costs = replace(COSTS, verify_pass=5.0 + 2.0 * gamma)
        texts = rounds(gamma, 10, 0.8, seed=trace)
        request(tape, texts, trace=trace, start=at, costs=costs, verifier="token")
        at += request_ms(texts, costs)
    path = tape.write(tmp_path / "two.jsonl")
    found = outlook(path, gamma=2)
    assert "recorded at 2, 8" in found.as_json()["gamma_assumption"]
    row = next(r for r in found.gammas if r.gamma == 5)
    assert row.round_ms == pytest.approx(replace(COSTS, verify_pass=15.0).round_ms(5))
    beyond = next(r for r in found.gammas if r.gamma == 16)
    assert beyond.round_ms == pytest.approx(replace(COSTS, verify_pass=37.0).round_ms(16))


def test_drafts_longer_than_those_that_are_listed(tmp_path: Path) -> None:
    texts = rounds(24, 60, 0.9, seed=8)
    found = outlook(recorded(tmp_path / "trace.jsonl", 1, texts))
    assert tokens_per_s(found, 24, "block") == pytest.approx(measured(texts))
    assert change(found, "verifier token").factor is not None
    shares = 1 + sum(a for _, a in texts) / 60
    (row,) = [r for r in found.gammas if (r.gamma, r.verifier) == (24, "block")]
    assert row.tokens_a_round == pytest.approx(shares)


def test_short_drafts_at_texts_ends_are_no_sample_of_short_drafts(tmp_path: Path) -> None:
    found = outlook(recorded(tmp_path / "trace.jsonl", 60, [(4, 3)] * 6 + [(2, 0), (1, 1)]))
    assert "only gamma 4 was recorded" in found.as_json()["gamma_assumption"]


def test_changes_of_known_worth(tmp_path: Path) -> None:
    texts = rounds(4, 100, 0.8, seed=3)
    found = outlook(recorded(tmp_path / "trace.jsonl", 1, texts))
    quick = replace(COSTS, draft_pass=COSTS.draft_pass / 2)
    assert change(found, "a drafter twice as fast").tokens_per_s == pytest.approx(
        measured(texts, quick)
    )
    # The prefill's millisecond of network is the only one outside of rounds.
    free = (1 + sum(a + 1 for _, a in texts)) / (
        request_ms(texts, replace(COSTS, network=0.0)) - 1.0
    )
    assert change(found, "a free network").tokens_per_s == pytest.approx(free * 1e3)
    ahead = change(found, "drafting ahead during verification")
    assert ahead.factor is not None
    assert 1 < ahead.factor < 1.5
    assert found.best is not None
    assert found.best.factor == max(
        c.factor for c in found.changes if c.factor is not None and c.together is None
    )


def test_a_drafter_that_is_never_right_makes_nothing_ahead_worth_its_while(
    tmp_path: Path,
) -> None:
    found = outlook(recorded(tmp_path / "trace.jsonl", 2, [(4, 0)] * 50))
    assert change(found, "drafting ahead during verification").factor == pytest.approx(1)
    assert found.best is not None
    assert found.best.change == "gamma 1"


def test_a_target_that_drafts_cannot_draft_ahead(tmp_path: Path) -> None:
    """It is busy verifying meanwhile."""
    texts = rounds(4, 100, 0.8, seed=3)
    found = outlook(recorded(tmp_path / "trace.jsonl", 1, texts, inside=True))
    assert not [change for change in found.changes if "ahead" in change.change]
    assert found.best is not None


def test_more_sequences_need_several_batch_sizes(tmp_path: Path) -> None:
    texts = rounds(4, 50, 0.8, seed=4)
    alone = outlook(recorded(tmp_path / "one.jsonl", 2, texts, batch=1))
    assert change(alone, "twice the sequences in a batch").factor is None
    tape = Tape()
    for trace, batch in enumerate((1, 2, 3), 1):
        costs = replace(COSTS, verify_pass=4.0 + batch)
        request(tape, texts, trace=trace, start=trace * 1e5, costs=costs, batch=batch)
    several = change(outlook(tape.write(tmp_path / "b.jsonl")), "twice the sequences in a batch")
    assert several.factor is not None
    assert several.together == pytest.approx(2 * several.factor)
    round_ms = replace(COSTS, verify_pass=6.0).round_ms(4)
    fixed = request_ms([])
    mean = fixed + 50 * round_ms
    assert several.factor == pytest.approx(mean / (mean + 50 * 2.0))


def test_at_temperature_0_all_rules_are_one(tmp_path: Path) -> None:
    texts = rounds(4, 50, 0.8, seed=5)
    found = outlook(recorded(tmp_path / "trace.jsonl", 2, texts, temperature=0.0))
    assert found.basis.way.greedy
    assert change(found, "verifier token").factor == pytest.approx(1)


def test_another_rules_own_rounds_are_taken_where_there_are_many(tmp_path: Path) -> None:
    tape = Tape()
    base, other = rounds(4, 400, 0.7, seed=6), rounds(4, 300, 0.9, seed=7)
    request(tape, base, trace=1, verifier="token")
    request(tape, other, trace=2, start=1e6, verifier="block")
    found = outlook(tape.write(tmp_path / "trace.jsonl"))
    assert found.basis.way.verifier == "token"
    better = change(found, "verifier block")
    assert "its own rounds" in better.assumption
    ratio = (1 + sum(a for _, a in other) / 300) / (1 + sum(a for _, a in base) / 400)
    assert better.factor == pytest.approx(ratio, rel=0.02)  # of its rounds, not its opening


def test_the_model_of_rules_agrees_with_what_was_measured() -> None:
    """docs/benchmark.md: 1.047 ± 0.005 at gamma 4 and 1.126 ± 0.011 at gamma 8."""
    shares = kept([0.70, 0.73, 0.75, 0.765, 0.775, 0.78, 0.785, 0.79])
    model = RatioModel(shares, "token")
    assert model.shares("token") == pytest.approx(shares, abs=1e-4)
    for gamma, ratio in ((4, 1.047), (8, 1.126)):
        block, token = (1 + sum(model.shares(rule)[:gamma]) for rule in ("block", "token"))
        assert block / token == pytest.approx(ratio, abs=0.015)
    back = RatioModel(model.shares("block"), "block").shares("token")
    assert back == pytest.approx(shares, abs=0.01)


def test_a_model_of_drafts_that_are_always_or_never_kept() -> None:
    assert RatioModel([1.0, 1.0], "token").shares("block") == pytest.approx([1, 1])
    assert RatioModel([0.0, 0.0], "token").shares("block") == pytest.approx([0, 0], abs=0.01)


def test_places_beyond_the_recorded_ones() -> None:
    assert continued([0.9, 0.5, 0.7], [100, 90, 45], 2) == [0.9, 0.5]
    later = (0.5 * 90 + 0.7 * 45) / 135
    assert continued([0.9, 0.5, 0.7], [100, 90, 45], 5) == pytest.approx(
        [0.9, 0.5, 0.7, later, later]
    )
    assert continued([0.9], [100], 3) == [0.9, 0.9, 0.9]
    assert continued([0.0, 0.0], [100, 0], 3) == [0.0, 0.0, 0.0]
    assert kept([0.5, 0.5]) == [0.5, 0.25]


def test_a_curve_goes_through_its_points_and_never_falls_beyond_them() -> None:
    curve = Curve({2.0: 4.0, 4.0: 6.0, 8.0: 6.0}, {2.0: 10, 4.0: 10, 8.0: 10})
    assert [curve.at(x) for x in (2, 3, 4, 6, 8)] == [4, 5, 6, 6, 6]
    assert curve.at(16) > 6
    falling = Curve({1.0: 9.0, 2.0: 3.0, 3.0: 8.0}, {1.0: 1, 2.0: 2, 3.0: 1})
    assert [falling.at(x) for x in (1, 2, 3)] == [5, 5, 8]
    assert Curve({4.0: 7.0}, {4.0: 1}).at(16) == 7


def test_rare_batch_sizes_do_not_count() -> None:
    often = PassWaits(steps=50, forward_ns=50_000)
    once = PassWaits(steps=1, forward_ns=9_000_000)
    assert batch_curve({("verify", 1): often, ("verify", 7): once}, "verify") is None


def test_a_recording_without_drafts(tmp_path: Path) -> None:
    path = recorded(tmp_path / "plain.jsonl", 3, [(0, 0)] * 10)
    with pytest.raises(Failure, match="no request with drafts"):
        outlook(path)
    drafted = recorded(tmp_path / "drafted.jsonl", 1, [(4, 2)] * 10)
    with pytest.raises(Failure, match="no request with drafts") as caught:
        outlook(drafted, verifier="token")
    assert caught.value.details == ("recorded: block, gamma 4, temperature > 0",)
