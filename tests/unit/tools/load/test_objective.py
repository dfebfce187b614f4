"""Which texts meet the objective, and the rate that a sweep finds."""

from __future__ import annotations

import math

import pytest

from tandem.failure import Misconfigured
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.objective import Goodput, Objective
from tandem.tools.load.report import LoadReport
from tandem.tools.load.sweep import Level, OpenLoop, best, failures, require_rate, rows, sweep
from tandem.tools.load.timeline import Timeline
from tests.unit.tools.load.test_load import SlowService

# Due at 10, asked for at 10.5: TTFT 1 s, latency 1.5 s, TPOT 0.1 s.
TEXT = Timeline(10.0, 10.5, ((11.0, 1), (11.3, 3), (11.5, 2)), 11.6)
FAILED = Timeline(10.0, 10.0, ((10.1, 1),), 10.2, "UNAVAILABLE: gone")


@pytest.mark.parametrize(
    ("objective", "good"),
    [
        (Objective(1001, 101), True),
        (Objective(999, 101), False),
        (Objective(1001, 99), False),
        (Objective(1001, 101, 1499), False),
        (Objective(None, None, 1501), True),
        (Objective(None, None), True),
    ],
)
def test_a_good_text_keeps_every_limit_from_when_it_was_due(
    objective: Objective, good: bool
) -> None:
    assert objective.met(TEXT) is good
    assert not objective.met(FAILED)


def test_goodput_counts_failed_texts_as_bad_ones() -> None:
    found = Objective(2000, 200, share=0.5).goodput([TEXT, TEXT, FAILED])
    assert found.share == pytest.approx(2 / 3)
    assert found.texts_per_s == pytest.approx(2 / 1.6)
    assert found.held
    assert not Objective(2000, 200, share=0.7).goodput([TEXT, TEXT, FAILED]).held


def level(rate: float, held: bool, texts: int = 5) -> Level:
    report = LoadReport.of([TEXT] * texts or [FAILED])
    return Level(rate, report, Goodput(1.0 if held else 0.5, rate, held))


@pytest.mark.parametrize("limit", [0.37, 1.0, 13.0])
async def test_a_sweep_finds_the_limit_to_within_a_tenth(limit: float) -> None:
    async def measure(rate: float) -> Level:
        return level(rate, rate <= limit)

    levels = await sweep(measure, start=2.0)
    found = best(levels)
    assert found is not None
    assert limit / 1.1 <= found.rate <= limit
    rates = [float(row[0]) for row in rows(levels)]
    assert rates == sorted(rates)


async def test_a_sweep_ends_where_nothing_fails_and_where_all_does() -> None:
    async def measure(rate: float) -> Level:
        return level(rate, held=True)

    async def refuse(rate: float) -> Level:
        return level(rate, held=False, texts=0)

    assert len(await sweep(measure, 1.0)) == 12

    async def disappoint(rate: float) -> Level:
        return level(rate, held=False)

    assert [low.rate for low in await sweep(disappoint, 1.0, lowest=0.2)] == [1, 0.5, 0.25]
    levels = await sweep(refuse, 1.0)
    assert len(levels) == 1
    assert best(levels) is None
    # Why it was refused is said, and a rate that no client could hold is not run.
    assert failures([*levels, level(2.0, held=False)]) == ["1 x UNAVAILABLE: gone"]
    assert [high.rate for high in await sweep(measure, 1.0, highest=5.0)] == [1, 2, 4]


def test_a_run_has_so_many_texts_at_most() -> None:
    require_rate(1000.0, 50.0)
    for rate, seconds in ((1001.0, 50.0), (math.inf, 1.0), (1.0, math.inf)):
        with pytest.raises(Misconfigured, match="at most 50000 a run"):
            require_rate(rate, seconds)
    assert OpenLoop(None, str, 20.0, Objective()).highest == 2500  # type: ignore[arg-type]


async def test_a_level_lasts_as_long_as_asked_for() -> None:
    service = SlowService(0.001)

    def request(number: int) -> pb.Generation:
        return pb.Generation(prompt=str(number))

    found = await OpenLoop(service, request, 0.1, Objective(), 7, 100).level(200.0)
    assert len(found.texts) == 20
    assert found.rate == 200
    again = found.as_json()["timelines"][0]
    assert Timeline.from_json(again) == found.texts[0]


async def test_an_open_loop_bounds_what_is_on_its_way_and_counts_the_wait() -> None:
    service = SlowService(0.02)
    generations = [pb.Generation(prompt=str(number)) for number in range(12)]
    timelines = await LoadGenerator.open_loop(service, generations, 1e4, 1, max_in_flight=3)
    assert service.most_busy == 3
    report = LoadReport.of(timelines)
    assert report.lag is not None
    assert report.lag.p99 > 40
    assert max(text.latency_s for text in timelines) > 0.07


def test_a_timeline_is_read_as_it_was_written() -> None:
    text = Timeline(1.0, 2.0, ((3.0, 4),), 5.0, "", pb.Summary(new_tokens=4, draft_bytes=1 << 40))
    assert Timeline.from_json(text.as_json()) == text
    assert Timeline.from_json(FAILED.as_json()) == FAILED
    with pytest.raises(ValueError, match="unheard_of"):
        Timeline.from_json({**text.as_json(), "summary": {"unheard_of": 1}})
