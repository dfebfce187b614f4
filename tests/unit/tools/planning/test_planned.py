"""What a plan reports: its bottleneck, its cost, and how much was simulated for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.failure import Failure
from tandem.tools.load.objective import Objective
from tandem.tools.planning import plan as plan_module
from tandem.tools.planning.measured.measurement import MeasuredText, Measurement
from tandem.tools.planning.plan import Prices, planned
from tandem.tools.planning.prediction import predicted
from tandem.tools.planning.simulation.engine import SimulatedEngine, Times
from tandem.tools.planning.simulation.rounds import Fleet, OfferedLoad, Rounds
from tandem.tools.planning.simulation.window import Window
from tandem.tools.planning.sizing import Need, Sizing
from tandem.tools.traces.prediction.costs import Curve
from tests.unit.tools.planning.test_planning import NONE_KEPT, SOME_KEPT, flat, measurement

pytestmark = pytest.mark.campaign(
    "plans for many objectives",
    "test_planning.py: simulations by text and by round agree; more texts need more targets",
)

LONG = replace(NONE_KEPT, texts=[MeasuredText(3000, 0.020, 0.002)])
# A target that gains nothing by a batch, and drafters that lose by one of more than 16.
STEEP_TARGET = measurement(Curve({1.0: 0.020, 64.0: 1.28}, {1.0: 1, 64.0: 1}))
STEEP_DRAFTER = measurement(
    draft=Curve({1.0: 0.002, 16.0: 0.002, 64.0: 0.5}, {1.0: 1, 16.0: 1, 64.0: 1})
)


@pytest.mark.parametrize(
    ("bound", "measured", "objective", "rate", "slots"),
    [
        ("nothing, one target is the least", SOME_KEPT, Objective(), 0.01, 64),
        ("the objective's TPOT", SOME_KEPT, Objective(5000, 14), 60, 64),
        ("the objective's TTFT", SOME_KEPT, Objective(45, None), 60, 64),
        ("the objective's latency", SOME_KEPT, Objective(None, None, 1500), 60, 64),
        ("the batch slots", NONE_KEPT, Objective(9000, None), 2, 2),
        ("the targets' engines", STEEP_TARGET, Objective(60_000, None), 2, 64),
        ("the drafters' engines", STEEP_DRAFTER, Objective(60_000, None), 40, 64),
    ],
)
def test_a_bound_is_what_fewer_targets_lack(
    bound: str, measured: Measurement, objective: Objective, rate: float, slots: int
) -> None:
    assert Sizing(measured, Need(rate, objective, slots), 4).sized().bound == bound


def test_where_only_plain_decoding_holds_an_objective_it_is_planned() -> None:
    """A round of 30 ms yields one token with drafts that are never kept, a plain one takes 21."""
    need = Need(20.0, Objective(1000.0, 25.0))
    plan = planned(NONE_KEPT, need, Prices(), None)
    assert plan.fleet.gamma == plan.fleet.drafters == 0
    assert plan.plain is None
    assert plan.speed_up is None
    assert "no fleet with drafts holds the objective" in plan.notes[0]
    with pytest.raises(Failure, match="without drafts 1 do: --gamma 0"):
        planned(NONE_KEPT, replace(need, rate=1.0), Prices(), 4)
    with pytest.raises(Failure, match="with 16384 targets"):
        planned(NONE_KEPT, Need(20.0, Objective(1000.0, 5.0)), Prices(), None)


@pytest.mark.parametrize(
    ("prices", "asked"),
    [
        (Prices(0.0, 0.5, 8, 1), (0.0, 0.5)),
        (Prices(4.0, 0.0, 8, 1), (4.0, 0.0)),
        (Prices(0.0, 0.0, 8, 1), (8.0, 1.0)),
    ],
)
def test_money_is_not_mixed_with_gpus(
    prices: Prices, asked: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def likely(measured: Measurement, target: float, drafter: float, slots: int) -> int:
        seen.append((target, drafter))
        return 4

    monkeypatch.setattr(plan_module, "likely_gamma", likely)
    planned(SOME_KEPT, Need(5.0, Objective()), prices, None)
    assert seen == [asked]


@pytest.mark.parametrize("clients", [2, 16, 128])
def test_a_window_sees_what_a_long_run_does(clients: int) -> None:
    fleet = Fleet(2, 1, 4)
    seen = Window(SOME_KEPT, fleet, clients, 0).look()
    run = Rounds(SOME_KEPT, fleet, OfferedLoad(max(12 * clients, 200), clients=clients)).run()
    assert 1 / seen.tokens_per_s == pytest.approx(run.tpot.mean(), rel=0.05)
    assert seen.ttft.mean() == pytest.approx(run.ttft.mean(), rel=0.1)
    assert seen.target_busy == pytest.approx(run.target_busy, rel=0.1)
    assert np.std(seen.tpot) == pytest.approx(np.std(run.tpot), rel=0.3)


def test_a_window_ends_however_long_texts_are_and_however_many() -> None:
    few = Window(LONG, Fleet(1, 1, 4, 1024), 64, 0)
    seen = few.look()
    assert few.steps < 2 * 20_100
    assert len(seen.ttft) >= 1
    assert 1 / seen.tokens_per_s == pytest.approx(0.030, rel=0.02)
    many = Window(LONG, Fleet(4, 4, 4, 1024), 4096, 0)
    many.look()
    assert many.steps < 2 * (8 * 4096 + 1024)


def test_prompts_that_take_many_passes_are_waited_for() -> None:
    """As long as the window is, they would never be seen to have their first token."""
    patient = replace(NONE_KEPT, texts=[MeasuredText(40, 0.4, 0.002, 20)])
    seen = Window(patient, Fleet(1, 1, 4, 1024), 512, 0).look()
    assert np.quantile(seen.ttft, 0.9) >= 20 * 0.020


def test_a_batch_that_comes_together_is_one_wake_and_one_pass() -> None:
    """A look at all others for each that comes would make large batches' work grow by squares."""
    events: list[tuple[float, Callable[[float], None]]] = []
    engine = SimulatedEngine(Times(flat(1.0), 100), 1.0, lambda at, then: events.append((at, then)))
    now, asked = 0.0, 0
    for _ in range(4):
        for text in range(100):
            engine.ask(now, text, lambda moment: None)
        while events:
            events.sort(key=lambda event: -event[0])
            now, then = events.pop()
            asked += 1
            then(now)
        now += 0.5
    assert engine.served == 400
    assert engine.passes <= 5  # nobody is known at first, and the first to come goes alone
    assert asked <= 3 * engine.passes


def test_the_work_of_a_plan_is_bounded_and_said() -> None:
    need = Need(5000.0, Objective(60_000.0, 200.0), slots=1024)
    small = Sizing(SOME_KEPT, replace(need, rate=50.0), 4).sized()
    assert small.simulated == small.targets
    large = Sizing(replace(LONG, shares=SOME_KEPT.shares), need, 4).sized()
    assert large.texts <= 60_000
    assert 1 <= large.simulated < large.targets
    fleet = planned(SOME_KEPT, replace(need, rate=50.0), Prices(), 4).as_json()["fleet"]
    assert fleet["simulated"] == {"targets": small.simulated, "texts": small.texts}


def test_a_fleet_of_alike_replicas_is_foretold_by_a_part_of_it() -> None:
    large = predicted(SOME_KEPT, Fleet(64, 64, 4), OfferedLoad(0, clients=4096))
    assert large.parts > 1
    assert large.of == 64
    assert large.texts * SOME_KEPT.steps(4) < 1_000_000
    one = predicted(SOME_KEPT, Fleet(1, 1, 4), OfferedLoad(0, clients=64))
    found, of_one = large.as_json(), one.as_json()
    assert found["tokens_per_s"] == pytest.approx(64 * of_one["tokens_per_s"], rel=0.1)
    assert found["tpot_p50_ms"] == pytest.approx(of_one["tpot_p50_ms"], rel=0.1)
    with pytest.raises(Failure, match="too much to be simulated"):
        predicted(LONG, Fleet(1, 1, 4), OfferedLoad(0, clients=4096))


@pytest.mark.parametrize(
    ("fleet", "load", "grows"),
    [
        (Fleet(1, 1, 4), OfferedLoad(0, rate=100_000.0), True),
        (Fleet(64, 64, 4), OfferedLoad(0, rate=100_000.0), True),
        (Fleet(1, 1, 4), OfferedLoad(0, rate=80.0), True),
        (Fleet(1, 1, 4), OfferedLoad(0, rate=2.0), False),
        (Fleet(1, 1, 4), OfferedLoad(0, rate=30.0), False),
        (Fleet(1, 1, 4), OfferedLoad(0, clients=200), False),
    ],
)
def test_a_queue_that_grows_without_end_is_said_to(
    fleet: Fleet, load: OfferedLoad, grows: bool
) -> None:
    found = predicted(SOME_KEPT, fleet, load)
    assert found.as_json()["queue_grows"] is grows
    if load.rate and not grows:
        assert found.texts_per_s == pytest.approx(load.rate, rel=0.1)
