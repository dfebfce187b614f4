"""What bounds failures: a breaker, a budget of moves, deadlines that follow stage times."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.pool.notifier import Notifier
from orchestrator.pool.retry_budget import RetryBudget
from tandem.peers.grpc.deadlines import Deadlines
from tandem.peers.replicas.breaker import Breaker


class Clock:
    """A monotonic clock that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("peers.replicas.breaker", "peers.grpc.deadlines"):
        monkeypatch.setattr(f"tandem.{module}.time", clock)
    monkeypatch.setattr("orchestrator.pool.retry_budget.time", clock)
    return clock


def test_one_that_fails_again_is_held_off_ever_longer(clock: Clock) -> None:
    breaker, holds = Breaker(), []
    for _ in range(10):
        breaker.open()
        holds.append(breaker.hold_seconds)
        clock.now += breaker.hold_seconds
        assert breaker.is_open  # time alone closes nothing
        breaker.close()
        assert not breaker.is_open
    assert holds[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert holds[-1] == 30.0
    clock.now += 61
    breaker.open()
    assert breaker.hold_seconds == 0.0


def test_another_process_begins_anew(clock: Clock) -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.open()
        breaker.close()
    breaker.open()
    assert breaker.hold_seconds > 0
    breaker.forget()
    assert breaker.is_open
    assert breaker.hold_seconds == 0.0


def test_moves_are_a_share_of_the_texts_of_late_and_a_few(clock: Clock) -> None:
    budget = RetryBudget(0.5, lambda: 0)
    for _ in range(40):
        budget.note_text()
    assert sum(budget.take() for _ in range(100)) == 16 + 20
    clock.now += 10
    assert not budget.take()
    clock.now += 20
    assert sum(budget.take() for _ in range(100)) == 16


def test_texts_under_way_may_move_however_long_ago_they_began(clock: Clock) -> None:
    budget = RetryBudget(1.0, lambda: 64)
    assert sum(budget.take() for _ in range(200)) == 16 + 64


def test_a_deadline_follows_what_steps_take(clock: Clock) -> None:
    deadlines = Deadlines(120.0, 60.0, 2.0)
    assert deadlines.step(patient=False) == 60.0  # nothing is known
    deadlines.note_step(0.01)
    assert deadlines.step(patient=False) == 2.0
    deadlines.note_step(1.0)
    assert deadlines.step(patient=False) == 5.0
    deadlines.note_step(100.0)
    assert deadlines.step(patient=False) == 60.0
    clock.now += 31
    deadlines.note_step(1.0)
    assert deadlines.step(patient=False) == 60.0
    clock.now += 31
    assert deadlines.step(patient=False) == 5.0
    assert deadlines.step(patient=True) == 60.0
    clock.now += 1000
    assert deadlines.step(patient=False) == 5.0, "the last that is known, however quiet it was"


def test_an_openings_deadline_follows_the_prompts_length(clock: Clock) -> None:
    deadlines = Deadlines(120.0, 60.0, 2.0)
    deadlines.note_opening(256, 1.0)
    assert deadlines.opening(256, patient=False) == pytest.approx(5.0)
    assert deadlines.opening(2304, patient=False) == pytest.approx(25.0)
    assert deadlines.opening(1 << 20, patient=False) == 120.0


async def test_news_is_looked_at_and_waiting_ends() -> None:
    news = Notifier()
    found: list[int] = []
    looking = asyncio.create_task(news.wait_for(lambda: found[0] if found else None, 10.0))
    await asyncio.sleep(0)
    news.notify()
    await asyncio.sleep(0.01)
    assert not looking.done()
    found.append(7)
    news.notify()
    assert await looking == 7
    found.clear()
    assert await news.wait_for(lambda: found[0] if found else None, 0.01) is None
