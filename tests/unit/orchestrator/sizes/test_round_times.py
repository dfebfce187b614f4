"""The learnt durations of rounds: means that a short disturbance does not move far."""

from __future__ import annotations

import pytest

from orchestrator.sizes.goodput import PLAIN
from orchestrator.sizes.round_times import RoundTimes
from orchestrator.text.contracts import DraftSize
from tandem.telemetry.stages import StageTimes
from tests.support.simulated_services import MS


def test_a_single_late_round_changes_nothing() -> None:
    times = RoundTimes()
    for _ in range(10):
        times.add(0, PLAIN, 10 * MS, None, StageTimes(forward_ns=8 * MS))
    times.add(0, PLAIN, 10_000 * MS, None, StageTimes(forward_ns=8 * MS))
    at = times.at(0)
    assert at is not None
    assert at.wall(PLAIN) < 13 * MS


def test_unmeasured_sizes_are_told_from_measured_ones() -> None:
    times = RoundTimes()
    drafted = StageTimes(forward_ns=8 * MS)
    for _ in range(4):
        times.add(0, DraftSize(4), 20 * MS, drafted, StageTimes(forward_ns=10 * MS))
    at = times.at(0)
    assert at is not None
    assert at.wall(DraftSize(6)) == pytest.approx((20 + 2 * 2 + 2 * 0.2) * MS)
    # Without drafts, their passes, their rows, and half of what is beside the models.
    assert at.wall(PLAIN) == pytest.approx((20 - 8 - 0.8 - 1) * MS)
    assert times.at(5) is at
    assert (times.seen(0, DraftSize(4)), times.seen(5, DraftSize(4))) == (4, 0)


def test_what_slows_one_size_slows_them_all() -> None:
    """Else the size that was left in a bad moment would be remembered by it."""
    times, ms = RoundTimes(), StageTimes(forward_ns=MS)
    at = DraftSize(4)
    for _ in range(10):
        times.add(0, PLAIN, 10 * MS, None, ms)
    for wall in (20, 40):
        for _ in range(200):
            times.add(0, at, wall * MS, None, ms)
    known = times.at(0)
    assert known is not None
    assert known.wall(at) / known.wall(PLAIN) == pytest.approx(2, rel=0.01)
    for _ in range(40):  # of a trial, which says what this size takes and nothing of others
        times.add(0, PLAIN, 10 * MS, None, ms, home=False)
    assert known.wall(PLAIN) == pytest.approx(10 * MS, rel=0.3)
    assert known.wall(at) == pytest.approx(40 * MS, rel=0.01)


def test_many_texts_make_no_longer_memory_of_a_moment() -> None:
    """The first rounds of 32 texts say little of those behind them: what is known of other sizes
    stays as it was while one that was just begun finds its time."""
    times, ms, texts = RoundTimes(), StageTimes(forward_ns=MS), 32
    for _ in range(40):
        times.add(5, PLAIN, 10 * MS, None, ms)
    for wall in (20, 30, 40, 40, 40, 40):  # a step of all texts, of which each says what it took
        for _ in range(texts):
            times.add(5, DraftSize(4), wall * MS, ms, ms, weight=1 / texts)
    known = times.at(5)
    assert known is not None
    assert known.wall(PLAIN) == pytest.approx(10 * MS, rel=0.001)
    assert known.wall(DraftSize(4)) == pytest.approx(35 * MS, rel=0.05)
    assert times.seen(5, DraftSize(4)) == pytest.approx(6)


def test_what_a_draft_takes_is_carried_to_a_load_without_drafts() -> None:
    """Else the longest drafts would seem to cost nothing there, and all texts would try them."""
    times, ms = RoundTimes(), StageTimes(forward_ns=8 * MS)
    times.add(0, DraftSize(4), 20 * MS, ms, ms)
    times.add(1, DraftSize(4), 30 * MS, StageTimes(forward_ns=12 * MS), ms)
    times.add(5, PLAIN, 40 * MS, None, ms)
    known = times.at(5)
    assert known is not None
    # Four passes more, and four rows.
    longer = known.wall(DraftSize(8)) - known.wall(DraftSize(4))
    assert longer == pytest.approx((4 * 3 + 4 * 0.02 * 8) * MS)
    for _ in range(4):
        times.add(5, DraftSize(4), 80 * MS, StageTimes(forward_ns=24 * MS), ms)
    assert known.draft.value == pytest.approx(6 * MS)  # what is known of others counts no more
