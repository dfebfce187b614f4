"""What is emitted of a resumed text, and the turns of the event loop that it takes."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import cast

import pytest

from orchestrator.text.emission import Emission
from orchestrator.text.stop_strings import TextStream
from tandem.peers.text.contracts import DraftReply, VerdictReply
from tandem.peers.text.measures import TextCounts
from tandem.peers.text.values import Origin, Stopping
from tandem.telemetry.stages import StageTimes


class CountingStream:
    """Releases no text, and counts the tokens that it sees."""

    def __init__(self) -> None:
        self.seen = 0
        self.stop_string = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        self.seen += 1
        return ""

    def place_of(self, token_id: int) -> int:
        return 0

    def flush(self) -> str:
        return ""


async def test_a_long_text_that_is_resumed_leaves_others_their_turns() -> None:
    stream = CountingStream()
    emission = Emission(Stopping(200_000), (), cast("TextStream", stream), TextCounts())
    turns = [0]

    async def other() -> None:
        while stream.seen < 128_000:
            turns.append(stream.seen)
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    await emission.resume([7] * 128_000)
    await beside
    assert max(after - before for before, after in pairwise(turns)) <= 500
    assert emission.left == 72_000


@pytest.mark.parametrize(
    ("parents", "place", "overlaps", "ranks", "origin"),
    [
        (None, 0, [0.5], [], Origin.CORRECTION),
        (None, 2, [0.5, 0.25, 0.125], [0, 0], Origin.CORRECTION),
        (None, 4, [0.5, 0.25, 0.125, 0.0625], [0] * 4, Origin.BONUS),
        # Two children of the root; the second one has two, of which the first is a leaf.
        ((0, 0, 2, 2), 0, [0.5], [], Origin.CORRECTION),
        ((0, 0, 2, 2), 1, [0.5], [0], Origin.BONUS),
        ((0, 0, 2, 2), 2, [0.5, 0.125], [1], Origin.CORRECTION),
        ((0, 0, 2, 2), 4, [0.5, 0.125], [1, 1], Origin.BONUS),
    ],
)
def test_a_round_counts_what_was_drafted_in_an_emitted_context(
    parents: tuple[int, ...] | None,
    place: int,
    overlaps: list[float],
    ranks: list[int],
    origin: Origin,
) -> None:
    """The overlap of the first child at each place of the kept path, and the kept ones' ranks."""
    counts = TextCounts()
    emission = Emission(Stopping(100), (), cast("TextStream", CountingStream()), counts)
    drafted = DraftReply([10, 11, 12, 13], parents, None, 0, StageTimes())
    path = drafted.path_to(place)
    decided = VerdictReply(place, len(path), 20, [0.5, 0.25, 0.125, 0.0625])
    round_ = emission.commit(1, [*path, 20], drafted, decided)
    assert counts.overlap_positions == len(overlaps)
    assert counts.overlap_sum == sum(overlaps)
    assert sum(counts.accepted_per_rank) == len(path)
    assert [counts.accepted_per_rank[rank] for rank in set(ranks)] == [
        ranks.count(rank) for rank in set(ranks)
    ]
    assert [token.origin for token in round_.tokens] == [*[Origin.ACCEPTED] * len(path), origin]
