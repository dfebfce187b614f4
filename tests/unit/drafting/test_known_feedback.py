"""Which positions a drafter knows: the newest unbroken run."""

from __future__ import annotations

import numpy as np

from tandem.drafting.known_feedback import KnownFeedback
from tandem.speculation.feedback import Feedback


def states(first: int, count: int) -> Feedback:
    """Each position's states are its number."""
    numbers = np.arange(first, first + count, dtype=np.float32)
    told = np.broadcast_to(numbers[:, None, None], (count, 2, 3))
    return Feedback(0, range(first, first + count), told)


def taken(known: KnownFeedback) -> list[int]:
    found: list[int] = []
    for part in known.take():
        assert isinstance(part.states, np.ndarray)
        assert part.states[:, 0, 0].tolist() == list(part.positions)
        assert not found or part.positions[0] == found[-1] + 1
        found += part.positions
    return found


def test_what_goes_on_is_taken_once() -> None:
    known = KnownFeedback()
    assert taken(known) == []
    known.add(states(2, 3))
    known.add(states(5, 1))
    assert taken(known) == [2, 3, 4, 5]
    assert taken(known) == []
    known.add(states(6, 2))
    assert taken(known) == [6, 7]
    assert known.end == 8


def test_behind_a_gap_a_run_begins() -> None:
    """After plain rounds, say, of which nothing was told."""
    known = KnownFeedback()
    known.add(states(0, 3))
    known.add(states(4, 2))
    assert taken(known) == [4, 5], "what was before the gap is of no use"
    assert known.end == 6


def test_what_is_known_stays_as_it_is() -> None:
    """Another target tells the last positions of its prompt again."""
    known = KnownFeedback()
    known.add(states(0, 5))
    assert taken(known) == [0, 1, 2, 3, 4]
    known.add(states(3, 2))
    assert taken(known) == []
    known.add(states(3, 4))
    assert taken(known) == [5, 6]
    assert known.end == 7
