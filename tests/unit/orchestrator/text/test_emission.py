"""What is emitted of a resumed text, and the turns of the event loop that it takes."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import cast

from orchestrator.text.emission import Emission
from orchestrator.text.stop_strings import TextStream
from tandem.peers.text.measures import TextCounts
from tandem.peers.text.values import Stopping


class CountingStream:
    """Releases no text, and counts the tokens that it sees."""

    def __init__(self) -> None:
        self.seen = 0
        self.stop_string = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        self.seen += 1
        return ""

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
