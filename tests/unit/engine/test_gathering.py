"""Which sequences a batch waits for, and for how long."""

from __future__ import annotations

import pytest

from tandem.engine.gathering import Gathering


@pytest.fixture
def gathering() -> Gathering[str]:
    """One sequence that stays away for 4 seconds as a rule, and left at 100."""
    gathering: Gathering[str] = Gathering()
    gathering.leave("a", 0)
    gathering.come("a", 4)
    gathering.leave("a", 100)
    return gathering


def test_nobody_is_away_at_first() -> None:
    assert Gathering[str]().patience(0, 10) == 0


def test_one_that_should_be_back_is_waited_for(gathering: Gathering[str]) -> None:
    assert gathering.patience(101, until=110) == pytest.approx(5, abs=0.1), "with some grace"
    assert gathering.patience(101, until=105) == 4, "but not beyond the limit"


def test_one_that_comes_too_late_is_not(gathering: Gathering[str]) -> None:
    assert gathering.patience(101, until=103.9) == 0


def test_one_that_is_overdue_is_not(gathering: Gathering[str]) -> None:
    assert gathering.patience(106.5, until=120) == 0


def test_one_is_waited_for_only_once(gathering: Gathering[str]) -> None:
    assert gathering.patience(101, until=103) == 0, "not before it is due"
    gathering.waited(until=103)
    assert gathering.patience(103, until=105) == 2
    gathering.waited(until=105)
    assert gathering.patience(105, until=107) == 0
    gathering.come("a", 108)
    gathering.leave("a", 200)
    assert gathering.patience(201, until=210) > 0, "but the next time again"


@pytest.mark.parametrize("how", ["come", "drop"])
def test_one_that_is_here_or_gone_is_not(gathering: Gathering[str], how: str) -> None:
    if how == "come":
        gathering.come("a", 101)
    else:
        gathering.drop("a")
    assert gathering.patience(101, until=110) == 0


def test_a_new_one_is_expected_like_the_others(gathering: Gathering[str]) -> None:
    gathering.come("a", 104)
    gathering.leave("b", 200)
    assert gathering.patience(201, until=210) > 3


def test_the_latest_counts(gathering: Gathering[str]) -> None:
    gathering.leave("b", 103)
    assert gathering.patience(104, until=120) == pytest.approx(5, abs=0.1)


def test_habits_change(gathering: Gathering[str]) -> None:
    gathering.come("a", 150)
    gathering.leave("a", 200)
    assert gathering.patience(201, until=210) == 0
