"""Simulated queues, compared with results computed by hand, and plans made from them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tandem.failure import Failure
from tandem.tools.load.objective import Objective
from tandem.tools.planning import sizing
from tandem.tools.planning.measured.measurement import MeasuredText, Measurement
from tandem.tools.planning.plan import Prices, planned
from tandem.tools.planning.simulation.pace import Pace, ratio_of
from tandem.tools.planning.simulation.rounds import Fleet, OfferedLoad, Rounds
from tandem.tools.planning.simulation.texts import SimulatedTexts
from tandem.tools.planning.sizing import Need, Sizing, good_share
from tandem.tools.traces.prediction.costs import Curve


def flat(seconds: float) -> Curve:
    return Curve({1.0: seconds}, {1.0: 1})


def measurement(
    verify: Curve | None = None, draft: Curve | None = None, shares: tuple[float, ...] = (0.0,) * 8
) -> Measurement:
    return Measurement(
        gamma=4,
        verify=verify or flat(0.020),
        draft=draft or flat(0.002),
        shares=shares,
        texts=[MeasuredText(101, 0.020, 0.002)],
        opening_s=0.004,
        round_s=0.002,
        orchestrator_text_s=0.001,
        orchestrator_round_s=0.0005,
    )


NONE_KEPT = measurement()
SOME_KEPT = measurement(
    Curve({1.0: 0.020, 16.0: 0.024}, {1.0: 1, 16.0: 1}),
    shares=(0.7, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1),
)


_PACES: dict[tuple[Any, ...], Pace] = {}


def pace_of(measured: Measurement, *rest: Any) -> Pace:
    """Measured once for each kind of fleet: that takes longer than all else here."""
    key = id(measured), *rest
    if key not in _PACES:
        _PACES[key] = Pace(measured, *rest)
    return _PACES[key]


@pytest.fixture(autouse=True)
def shared_paces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "Pace", pace_of)


def test_one_text_takes_the_sum_of_its_parts() -> None:
    seen = Rounds(NONE_KEPT, Fleet(1, 1, 4), OfferedLoad(3, clients=1)).run()
    # A round yields a token: 4 passes of the drafter, one of the target, and what is beside.
    assert seen.tpot == pytest.approx(0.008 + 0.020 + 0.002)
    # The prompt's pass is one that every sequence takes.
    assert seen.ttft == pytest.approx(0.004 + 0.020)
    # Without a draft there is one call a round, and half of what is beside.
    plain = Rounds(NONE_KEPT, Fleet(1, 0, 0), OfferedLoad(3, clients=1)).run()
    assert plain.tpot == pytest.approx(0.020 + 0.001)


def test_a_fully_kept_draft_yields_gamma_and_one() -> None:
    kept = measurement(shares=(1.0,) * 8)
    seen = Rounds(kept, Fleet(1, 1, 4), OfferedLoad(3, clients=1)).run()
    assert seen.tpot == pytest.approx(0.030 * 20 / 100)


def test_acceptance_is_that_of_the_shares() -> None:
    run = Rounds(SOME_KEPT, Fleet(1, 1, 4), OfferedLoad(1, clients=1))
    mean = np.mean([run.accepted() for _ in range(20_000)])
    assert mean == pytest.approx(0.7 + 0.5 + 0.4 + 0.3, abs=0.03)


def test_texts_that_come_together_share_passes() -> None:
    """Passes that take as long for eight as for one: eight times the tokens, nearly."""
    one = Rounds(NONE_KEPT, Fleet(1, 1, 4), OfferedLoad(20, clients=1)).run()
    eight = Rounds(NONE_KEPT, Fleet(1, 1, 4), OfferedLoad(160, clients=8)).run()
    assert eight.target_batch > 7
    assert eight.tokens_per_s > 7 * one.tokens_per_s


def test_an_engine_that_never_waits_is_never_idle_for_others() -> None:
    """Without gathering, two groups take turns: the engine is busier, with smaller batches."""
    gathered = Rounds(NONE_KEPT, Fleet(1, 1, 4, gather=1.0), OfferedLoad(160, clients=8)).run()
    hasty = Rounds(NONE_KEPT, Fleet(1, 1, 4, gather=0.0), OfferedLoad(160, clients=8)).run()
    assert hasty.target_batch < gathered.target_batch
    assert hasty.target_busy > gathered.target_busy


def test_every_text_ends_and_none_before_it_came() -> None:
    run = Rounds(SOME_KEPT, Fleet(2, 1, 4, slots=3), OfferedLoad(300, rate=40.0))
    run.run()
    assert len(run.ended) == 300
    assert {engine.active for engine in (*run.targets, *run.drafters)} == {0}
    for text in run.ended:
        assert text.arrived <= text.placed < text.first < text.ended


def test_texts_wait_for_a_place() -> None:
    few = Rounds(NONE_KEPT, Fleet(1, 1, 4, slots=2), OfferedLoad(40, clients=8)).run()
    assert few.slots_held > 0.9
    assert np.median(few.ttft) > 2.0  # a text before it took 3 s
    many = Rounds(NONE_KEPT, Fleet(1, 1, 4, slots=8), OfferedLoad(40, clients=8)).run()
    assert np.median(many.ttft) < 0.2


def test_two_targets_serve_twice_what_one_does() -> None:
    one = Rounds(SOME_KEPT, Fleet(1, 1, 4), OfferedLoad(160, clients=8)).run()
    two = Rounds(SOME_KEPT, Fleet(2, 2, 4), OfferedLoad(320, clients=16)).run()
    assert two.tokens_per_s == pytest.approx(2 * one.tokens_per_s, rel=0.1)


# At the low rate texts seldom meet, so that fewer show what all are like.
@pytest.mark.parametrize(("rate", "texts"), [(2.0, 500), (16.0, 1500), (36.0, 1500)])
def test_a_fleet_text_by_text_is_like_one_round_by_round(rate: float, texts: int) -> None:
    pace = pace_of(SOME_KEPT, Fraction(1, 2), 4, 64, 1.0, 0)
    by_text = SimulatedTexts(SOME_KEPT, pace, 4, rate, texts, 0).run()
    by_round = Rounds(SOME_KEPT, Fleet(4, 2, 4), OfferedLoad(texts, rate=rate)).run()
    assert by_text.texts_per_s == pytest.approx(by_round.texts_per_s, rel=0.1)
    for share in (0.5, 0.99):
        own, other = (float(np.quantile(s.tpot, share)) for s in (by_text, by_round))
        assert own == pytest.approx(other, rel=0.2), share
    # Texts of two targets seldom meet at their drafter at a low rate; in a level they always do.
    for name, near in (("slots_held", 0.1), ("target_busy", 0.1), ("drafter_busy", 0.3)):
        own, other = getattr(by_text, name), getattr(by_round, name)
        assert own == pytest.approx(other, rel=near), name


def test_texts_wait_for_a_place_text_by_text_too() -> None:
    pace = Pace(NONE_KEPT, Fraction(1), 4, 2, 1.0, 0)
    # Two places for texts of 3 s: 0.6 a second at most.
    busy = SimulatedTexts(NONE_KEPT, pace, 1, 0.9, 200, 0).run()
    assert busy.texts_per_s == pytest.approx(0.66, rel=0.05)
    assert np.quantile(busy.ttft, 0.99) > 30
    assert busy.slots_held > 0.95


def test_a_ratio_is_of_small_numbers_and_no_less() -> None:
    for wanted in (0.1, 0.25, 0.3, 0.6, 1.0, 1.1, 2.7):
        found = ratio_of(wanted)
        assert found >= Fraction(wanted) - Fraction(1, 10**6)
        assert found.denominator <= 4
        assert found - Fraction(wanted) <= Fraction(1, 4)


def test_more_texts_need_more_targets_and_just_enough() -> None:
    need = Need(160.0, Objective(1000.0, 40.0))
    sized = Sizing(SOME_KEPT, need, 4).sized()
    assert sized.good >= 0.99
    assert good_share(sized.served, need.objective) == sized.good
    assert sized.served.texts_per_s == pytest.approx(160, rel=0.15)
    tighter = Sizing(SOME_KEPT, Need(160.0, Objective(1000.0, 14.0)), 4)
    more = Sizing(SOME_KEPT, Need(640.0, Objective(1000.0, 40.0)), 4)
    assert tighter.targets > sized.targets
    assert 3 * sized.targets <= more.targets <= 5 * sized.targets


def test_an_objective_below_a_round_is_held_by_no_fleet() -> None:
    with pytest.raises(Failure, match="with 16384 targets"):
        Sizing(SOME_KEPT, Need(10.0, Objective(1000.0, 1.0)), 4)


def test_a_plan_prices_what_it_says() -> None:
    prices = Prices(4.0, 1.0, 2, 1)
    plan = planned(SOME_KEPT, Need(60.0, Objective(1000.0, 30.0)), prices, 4)
    fleet = plan.fleet
    assert plan.gpus(fleet) == 2 * fleet.targets + fleet.drafters
    hourly = 4 * fleet.targets + fleet.drafters
    million = plan.million_tokens(fleet)
    # Of the asked rate, not of the sample that was simulated.
    assert million == pytest.approx(hourly / (60 * 101 * 3600) * 1e6)
    assert plan.as_json()["fleet"]["tokens_per_s"] == pytest.approx(60 * 101)
    assert plan.tokens_a_round == pytest.approx(2.9)
    assert plan.plain is not None
    assert plan.plain.drafters == plan.plain.gamma == 0
    assert plan.speed_up is not None
    assert plan.speed_up > 1
    assert plan.as_json()["bound"] == fleet.bound
    # Drafts that are never kept are paid for all the same.
    assert planned(NONE_KEPT, Need(60.0, Objective(1000.0, 60.0)), prices, 4).is_cheaper_plain
    assert not plan.is_cheaper_plain
    without = replace(plan, prices=Prices())
    assert without.million_tokens(without.fleet) is None
