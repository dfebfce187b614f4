"""What rounds are expected to take: by profiles, and by the rounds that happened."""

from __future__ import annotations

import pytest

from orchestrator.sizes.goodput import PLAIN
from orchestrator.sizes.round_times import SLOW, RoundTimes
from tandem.peers.text.contracts import DraftReply, VerdictReply
from tandem.profile import Profile
from tandem.speculation.tree import DraftSize
from tandem.telemetry.stages import StageTimes
from tests.support.simulated_services import MS

VERIFY = Profile([(t, r, (8 + 0.1 * t * r) * MS) for t in (1, 4, 16) for r in (1, 5, 17)])
DRAFT = Profile([(t, r, 0.5 * MS) for t in (1, 4) for r in (1, 5)])


def told(
    times: RoundTimes, size: DraftSize, wall: float, texts: int = 1, slower: float = 1.0
) -> None:
    """A round that was measured, in milliseconds; the models took so many times their profile."""
    verify = StageTimes(
        forward_ns=round(slower * VERIFY.at(texts, 1 + size.gamma)), batch_size=texts
    )
    draft = StageTimes(forward_ns=round(slower * size.gamma * 0.5 * MS), batch_size=texts)
    drafted = DraftReply([0] * size.gamma, None, None, 0, draft) if size.gamma else None
    for _ in range(texts):
        times.add(size, texts, wall * MS, drafted, VerdictReply(0, 0, 0, (), verify))


def wall(times: RoundTimes, size: DraftSize, texts: int = 1) -> float:
    return times.wall(size, texts) / MS


def test_before_the_first_round_the_profiles_are_believed() -> None:
    times = RoundTimes(VERIFY, DRAFT)
    assert wall(times, PLAIN) == pytest.approx(8.1)
    assert wall(times, DraftSize(4)) == pytest.approx(8.5 + 2)
    assert wall(times, DraftSize(4), texts=4) == pytest.approx(8 + 2.0 + 2)
    assert wall(times, DraftSize(4, 8)) == pytest.approx(8.9 + 2)  # rows of a tree are its nodes


def test_what_is_beside_the_passes_is_learnt_for_each_kind_and_load() -> None:
    times = RoundTimes(VERIFY, DRAFT)
    for _ in range(40):
        told(times, PLAIN, 8.1 + 1)
        told(times, DraftSize(4), 10.5 + 3)
    assert wall(times, PLAIN) == pytest.approx(9.1, rel=0.01)
    assert wall(times, DraftSize(8)) == pytest.approx(8.9 + 4 + 3, rel=0.01)
    # Another load has what the nearest one has, until it is known.
    assert wall(times, PLAIN, texts=8) == pytest.approx(8.8 + 1, rel=0.01)
    for _ in range(40):
        told(times, PLAIN, 8.8 + 6, texts=8)
    assert wall(times, PLAIN, texts=8) == pytest.approx(14.8, rel=0.01)
    assert wall(times, PLAIN) == pytest.approx(9.1, rel=0.01)


def test_a_machine_that_is_slower_is_so_for_all_sizes() -> None:
    times = RoundTimes(VERIFY, DRAFT)
    for _ in range(100):
        told(times, DraftSize(4), 3 * 10.5, slower=3)
    assert wall(times, PLAIN) == pytest.approx(3 * 8.1, rel=0.02)
    assert wall(times, DraftSize(8)) == pytest.approx(3 * (8.9 + 4), rel=0.02)


def test_services_that_measured_nothing_are_known_by_their_rounds() -> None:
    times = RoundTimes(Profile(), Profile())
    for _ in range(100):
        told(times, DraftSize(4), 10.5 + 1)
    assert wall(times, DraftSize(4)) == pytest.approx(11.5, rel=0.02)
    assert wall(times, DraftSize(8)) == pytest.approx(14, rel=0.1)
    without_model = RoundTimes(VERIFY, Profile())
    assert wall(without_model, DraftSize(4)) == pytest.approx(8.5)


def test_a_single_late_round_changes_little() -> None:
    times = RoundTimes(VERIFY, DRAFT)
    for _ in range(10):
        told(times, PLAIN, 9)
    told(times, PLAIN, 10_000)
    assert wall(times, PLAIN) < 11


def test_a_stall_of_a_service_is_soon_forgotten() -> None:
    times = RoundTimes(VERIFY, DRAFT)
    for size, took in ((PLAIN, 9.1), (DraftSize(4), 12)):
        for _ in range(40):
            told(times, size, took)
    told(times, DraftSize(4), 1000, slower=100)
    assert wall(times, DraftSize(4)) < 14
    for _ in range(40):
        told(times, DraftSize(4), 40, slower=3)
    for _ in range(5 * SLOW):
        told(times, PLAIN, 9.1)
    assert wall(times, DraftSize(4)) < 14


def test_another_load_gives_up_what_is_known_too() -> None:
    times = RoundTimes(VERIFY, DRAFT)
    for _ in range(40):
        told(times, DraftSize(4), 200)
    for _ in range(SLOW):
        told(times, PLAIN, 10, texts=8)
    assert wall(times, DraftSize(4), texts=8) < 200 - 0.5 * 10


def test_what_is_remembered_of_the_other_kind_is_given_up_slowly() -> None:
    """Else a kind that was slow in a bad moment would never be used again."""
    times = RoundTimes(VERIFY, DRAFT)
    for _ in range(10):
        told(times, DraftSize(4), 40)
    for _ in range(SLOW // 8):
        told(times, PLAIN, 9.1)
    assert wall(times, DraftSize(4)) > 35
    for _ in range(6 * SLOW):
        told(times, PLAIN, 9.1)
    least = 10.5 + 1  # a plain round's messages
    assert wall(times, DraftSize(4)) == pytest.approx(least, rel=0.05)
    for _ in range(4):  # a few rounds say more than what was remembered
        told(times, DraftSize(4), 40)
    assert wall(times, DraftSize(4)) > 30


def test_a_round_takes_some_time_whatever_was_measured() -> None:
    times = RoundTimes(VERIFY, DRAFT)
    for _ in range(10):
        told(times, DraftSize(4), 0)
    assert wall(times, DraftSize(4)) > 5
