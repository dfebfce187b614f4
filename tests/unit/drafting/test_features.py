"""Which positions a drafter knows: the newest unbroken run."""

from __future__ import annotations

import numpy as np

from tandem.drafting.features import Feature, Features


def states(first: int, count: int) -> Feature:
    """Each position's states are its number."""
    numbers = np.arange(first, first + count, dtype=np.float32)
    return Feature(first, np.broadcast_to(numbers[:, None, None], (count, 2, 3)))


def taken(features: Features) -> list[int]:
    found: list[int] = []
    for part in features.take():
        assert isinstance(part.states, np.ndarray)
        assert part.states[:, 0, 0].tolist() == list(range(part.first, part.end))
        assert not found or part.first == found[-1] + 1
        found += range(part.first, part.end)
    return found


def test_what_goes_on_is_taken_once() -> None:
    features = Features()
    assert taken(features) == []
    features.add(states(2, 3))
    features.add(states(5, 1))
    assert taken(features) == [2, 3, 4, 5]
    assert taken(features) == []
    features.add(states(6, 2))
    assert taken(features) == [6, 7]
    assert features.end == 8


def test_behind_a_gap_a_run_begins() -> None:
    """After plain rounds, say, of which nothing was told."""
    features = Features()
    features.add(states(0, 3))
    features.add(states(4, 2))
    assert taken(features) == [4, 5], "what was before the gap is of no use"
    assert features.end == 6


def test_what_is_known_stays_as_it_is() -> None:
    """Another target tells the last positions of its prompt again."""
    features = Features()
    features.add(states(0, 5))
    assert taken(features) == [0, 1, 2, 3, 4]
    features.add(states(3, 2))
    assert taken(features) == []
    features.add(states(3, 4))
    assert taken(features) == [5, 6]
    assert features.end == 7
