"""For how long nobody asks, after drafts that came late."""

from __future__ import annotations

from tandem_vllm.text import Backoff


def passes(backoff: Backoff) -> int:
    """Until one asks again."""
    count = 0
    while not backoff.is_over:
        count += 1
    return count


def test_twice_as_many_passes_each_time() -> None:
    backoff, found = Backoff(), []
    assert passes(backoff) == 0
    for _ in range(8):
        backoff.note(late=True)
        found.append(passes(backoff))
    assert found == [2, 4, 8, 16, 32, 64, 64, 64]
    assert backoff.late == 8
    backoff.note(late=False)
    assert (passes(backoff), backoff.late) == (0, 0)
    backoff.note(late=True)
    assert passes(backoff) == 2
