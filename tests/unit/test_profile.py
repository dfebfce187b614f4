"""What passes take between those that were measured, and beyond."""

from __future__ import annotations

from math import inf, nan

import pytest

from tandem.profile import Profile


def test_passes_between_measured_ones() -> None:
    profile = Profile([(4, 5, 400), (1, 1, 100), (1, 5, 200), (4, 1, 300)])  # in any order
    assert profile.known
    assert profile.at(1, 1) == 100
    assert profile.at(1, 3) == 150
    assert profile.at(4, 3) == 350
    assert profile.at(2.5, 3) == 250


def test_passes_beyond_measured_ones() -> None:
    profile = Profile([(1, 1, 100), (1, 5, 200), (4, 1, 300), (4, 5, 400)])
    assert profile.at(1, 9) == 300
    assert profile.at(7, 1) == 500
    # A noisy measurement makes no pass cheaper than a smaller one.
    assert Profile([(1, 1, 200), (1, 5, 190)]).at(1, 100) == 200
    noisy = Profile([(1, 1, 10), (1, 5, 8), (1, 17, 20)])
    assert noisy.at(1, 5) == 10 < noisy.at(1, 6)


def test_a_pass_that_is_told_twice() -> None:
    assert Profile([(1, 1, 5.0), (1, 1, 6.0), (4, 1, 7.0)]).at(1, 1) == 6


def test_rows_of_one_sequence_stand_for_those_of_several() -> None:
    profile = Profile([(1, 1, 100), (1, 17, 260)])
    assert profile.at(4, 2) == profile.at(1, 8) == 170
    assert Profile([(1, 1, 100)]).at(8, 5) == 100


@pytest.mark.parametrize("measured", [(), [(0, 1, 5)], [(1, 0, 5)], [(1, 1, 0)], [(1, 1, -3)]])
def test_without_a_measurement_a_row_more_adds_little(measured: list[tuple[int, int, int]]) -> None:
    profile = Profile(measured)
    assert not profile.known
    assert profile.at(1, 2) / profile.at(1, 1) == pytest.approx(1.02)
    assert profile.at(0, 0) > 0


def test_rows_of_prompts_are_told_apart_from_rows_of_many_sequences() -> None:
    few = [(1, 1, 100), (1, 17, 260), (16, 1, 150), (16, 17, 2810)]
    assert Profile(few).rows_within(100) == pytest.approx(10)
    assert Profile(few).rows_within(100, 50) == pytest.approx(10)
    prompts = Profile([*few, (1, 117, 460), (1, 517, 660)])
    assert prompts.rows_within(200, 17) == pytest.approx(100)
    assert prompts.rows_within(300, 17) == pytest.approx(300)
    assert prompts.rows_within(500, 17) == pytest.approx(700), "as the last rows, beyond them"
    assert prompts.rows_within(0, 17) == 0


def test_a_single_measurement_says_that_rows_cost_nothing() -> None:
    assert Profile([(1, 1, 100)]).rows_within(75) == inf


def test_a_damaged_record_says_nothing() -> None:
    assert not Profile([(1, 1, nan), (1, 5, inf)]).known
