"""Seconds of each minute."""

from __future__ import annotations

import pytest

from tandem.online.budget import Budget


class Simulated:
    """A process whose clocks are moved by hand."""

    def __init__(self) -> None:
        self.now = self.spent = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.spent += seconds


@pytest.mark.parametrize("seconds", [0.5, 6.0, 30.0])
def test_no_more_than_its_share_is_spent(seconds: float) -> None:
    process = Simulated()
    budget = Budget(seconds, lambda: process.spent, lambda: process.now, process.sleep)
    for turn in range(1000):
        process.work(0.01 + turn % 7 / 100)
        budget.wait()
    assert process.spent / process.now == pytest.approx(seconds / 60, rel=1e-6)


def test_all_of_a_minute_is_no_limit() -> None:
    process = Simulated()
    budget = Budget(60.0, lambda: process.spent, lambda: process.now, process.sleep)
    process.work(5)
    budget.wait()
    assert process.now == 5


def test_what_was_not_used_is_not_saved_up() -> None:
    process = Simulated()
    budget = Budget(6.0, lambda: process.spent, lambda: process.now, process.sleep)
    process.now += 1000
    budget.wait()
    process.work(1)
    budget.wait()
    assert process.now == pytest.approx(1010)
