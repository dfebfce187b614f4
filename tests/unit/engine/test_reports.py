"""When results are told that come before a job's end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tandem.engine.admission import RoomWanted
from tandem.engine.asks import Report, Score, Steps
from tandem.engine.job import Job
from tandem.errors import EngineFailure
from tandem.inference.feed import Feed
from tests.support.models.engines import target_engine, target_sequence
from tests.support.models.tiny import running

pytestmark = pytest.mark.real_time  # the engine has its thread


class Device:
    """Answers passes with nothing, and notes when it was given work and waited for.

    Attributes:
        ahead: whether it works by itself.
        told: by turns: "launch", "wait", and "settle".
        lost: from this step on; it does not know its times either then.
    """

    def __init__(self, told: list[Any], *, ahead: bool, waits: Callable[[int], bool]) -> None:
        self.ahead, self.told = ahead, told
        self.lost = 1 << 30
        self._waits, self._steps = waits, 0

    def step(self, jobs: Sequence[Job[Any]], meanwhile: Callable[[], None]) -> None:
        self.told.append("launch")
        self._steps += 1
        if self._steps >= self.lost:
            raise RuntimeError("the device is gone")
        if self._waits(self._steps):
            meanwhile()
            self.told.append("wait")
        for job in jobs:
            job.resume()
            while isinstance(job.ask, Report):
                job.report(job.ask.result)
        if any(job.over for job in jobs):
            self.settle()

    def settle(self) -> None:
        if self._steps >= self.lost:
            raise RuntimeError("the device is gone")
        self.told.append("settle")

    def answers(self) -> bool:
        return self._steps < self.lost


def steps(passes: Sequence[int | None]) -> Steps[None]:
    """A pass for each, and after it a report of its number, where it has one."""
    for number in passes:
        yield Score(None, Feed(None, [1], 1))  # type: ignore[arg-type]
        if number is not None:
            yield Report(number)


async def told_of(
    passes: Sequence[int | None],
    *,
    ahead: bool,
    waits: Callable[[int], bool] = lambda _: True,
    lost: int | None = None,
) -> list[Any]:
    """What happens while a job runs, in the order of the engine's thread. If the device is lost at
    a step, all that was reported before is heard."""
    told: list[Any] = []
    heard: list[int] = []
    engine = target_engine()
    engine._stepper = device = Device(told, ahead=ahead, waits=waits)
    wake = engine._wake

    def waking(jobs: Sequence[Job[Any]], reported: Any = ()) -> None:
        told.extend(one.result for _, reports in reported for one in reports)
        told.extend("end" for _ in jobs)
        wake(jobs, reported)

    engine._wake = waking  # type: ignore[method-assign]
    async with running(engine):
        sequence = target_sequence([1, 2])
        await engine.open(sequence, steps([None]), RoomWanted(4))
        told.clear()
        job = engine.run(
            sequence, steps(passes), on_report=lambda number, times: heard.append(number)
        )
        if lost is None:
            await job
        else:
            device.lost = lost
            with pytest.raises(EngineFailure):
                await job
            passes = passes[: lost - 2]
        engine.release(sequence)
    assert heard == [number for number in passes if number is not None]
    return told


async def test_a_device_that_works_by_itself_gets_its_next_pass_before_a_report_is_told() -> None:
    told = await told_of([1, 2, None, 3], ahead=True)
    assert told == [
        *("launch", "wait"),
        *("launch", "settle", 1, "wait"),
        *("launch", "settle", 2, "wait"),
        *("launch", "wait", "settle", 3, "end"),
    ]


async def test_elsewhere_a_report_is_told_behind_its_pass() -> None:
    told = await told_of([1, 2], ahead=False)
    assert told == ["launch", "wait", 1, "launch", "wait", "settle", 2, "end"]


async def test_a_report_is_not_held_for_long_if_nobody_waits_for_the_device() -> None:
    told = await told_of([1, None, None, None, None], ahead=True, waits=lambda step: step == 2)
    assert told == [
        "launch",
        "wait",
        "launch",
        "launch",
        "settle",
        1,
        "launch",
        "launch",
        "settle",
        "end",
    ]


@pytest.mark.parametrize("lost", [2, 3, 4])
async def test_what_was_reported_is_told_although_the_device_is_lost_behind_it(lost: int) -> None:
    told = await told_of([1, 2, 3], ahead=True, lost=lost)
    assert told[-1] == "end"
