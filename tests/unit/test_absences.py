"""Who is waited for, and for how long."""

from __future__ import annotations

import pytest

from tandem.inference.absences import Absences


@pytest.fixture
def absences() -> Absences[str]:
    """One sequence that stays away for 4 seconds as a rule, and left at 100."""
    absences: Absences[str] = Absences()
    absences.leave("a", 0)
    absences.come("a", 4)
    absences.leave("a", 100)
    return absences


def test_nobody_is_away_at_first() -> None:
    assert Absences[str]().patience(0, 10) == 0


def test_one_that_should_be_back_is_waited_for(absences: Absences[str]) -> None:
    assert absences.patience(101, until=110) == pytest.approx(5, abs=0.1), "with some grace"
    assert absences.patience(101, until=105) == 4, "but not beyond the limit"


def test_one_that_comes_too_late_is_not(absences: Absences[str]) -> None:
    assert absences.patience(101, until=103.9) == 0


def test_one_that_is_overdue_is_not(absences: Absences[str]) -> None:
    assert absences.patience(106.5, until=120) == 0


def test_one_is_waited_for_only_once(absences: Absences[str]) -> None:
    assert absences.patience(101, until=103) == 0, "not before it is due"
    absences.waited(until=103)
    assert absences.patience(103, until=105) == 2
    absences.waited(until=105)
    assert absences.patience(105, until=107) == 0
    absences.come("a", 108)
    absences.leave("a", 200)
    assert absences.patience(201, until=210) > 0, "but the next time again"


@pytest.mark.parametrize("how", ["come", "forget"])
def test_one_that_is_here_or_gone_is_not(absences: Absences[str], how: str) -> None:
    if how == "come":
        absences.come("a", 101)
    else:
        absences.forget("a")
    assert absences.patience(101, until=110) == 0


def test_a_new_one_is_expected_like_the_others(absences: Absences[str]) -> None:
    absences.come("a", 104)
    absences.leave("b", 200)
    assert absences.patience(201, until=210) > 3


def test_the_latest_counts(absences: Absences[str]) -> None:
    absences.leave("b", 103)
    assert absences.patience(104, until=120) == pytest.approx(5, abs=0.1)


def test_habits_change(absences: Absences[str]) -> None:
    absences.come("a", 150)
    absences.leave("a", 200)
    assert absences.patience(201, until=210) == 0
