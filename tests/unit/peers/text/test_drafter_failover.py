"""A text's drafter: opened beside the target or late, let go and opened again, lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.common.v1 import common_pb2
from tandem.errors import OutOfTime, SequenceIdled, TandemError, Unavailable
from tandem.peers.text.contracts import AheadWay, DraftReply, News, Prompt
from tandem.peers.text.drafter_failover import REST_SECONDS, DrafterWithFailover
from tandem.peers.text.record import TextRecord
from tandem.peers.text.values import Rule
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tandem.telemetry.stages import StageTimes

TWO, NONE = DraftSize(2), DraftSize(0)
BLOCK, GREEDY_BLOCK = Rule("block"), Rule("greedy_block", needs_every_draft=True)
MOST_BYTES = 100


class Fake:
    """A drafter that notes what it is asked."""

    def __init__(self) -> None:
        self.may_open = asyncio.Event()
        self.opened: list[int] = []
        self.asked: list[tuple[int, int, list[int]]] = []
        self.told: list[list[int]] = []
        self.cancelled = False

    async def open(self, prompt: Prompt) -> StageTimes:
        self.opened = list(prompt.token_ids)
        await self.may_open.wait()
        return StageTimes()

    async def draft(
        self,
        round_: int,
        position: int,
        news: News,
        size: DraftSize,
        needs_every_draft: bool,
        ahead: AheadWay = AheadWay.NOTHING,
    ) -> DraftReply:
        self.asked.append((round_, position, list(news.token_ids)))
        self.told.append([each.round for each in news.feedback])
        return DraftReply([7] * size.gamma, None, None, 0, StageTimes())

    async def close(self) -> None: ...

    def cancel(self) -> None:
        self.cancelled = True


class Text:
    """A text that grows, and its drafting."""

    def __init__(self, drafters: list[Any], rule: Rule = BLOCK) -> None:
        self.tokens = [1, 2, 3]
        self.losses = self.left = 0
        self.round = 0
        self.drafters = drafters
        self.drafting = DrafterWithFailover(
            lambda: self.drafters.pop(0),
            self.prompt,
            TextRecord(),
            lambda: 1.0,
            rule,
            self.lose,
            self.let_go,
            MOST_BYTES,
        )

    def prompt(self) -> Prompt:
        return Prompt("text", list(self.tokens), Sampling(seed=1), self.round, 100, 50)

    def lose(self, error: TandemError | None) -> None:
        self.losses += 1

    def let_go(self) -> None:
        self.left += 1

    async def go(self, size: DraftSize, feedback_bytes: int = 0) -> DraftReply | None:
        """A round that emits one token, of which the target tells so many bytes."""
        self.round += 1
        drafted = await self.drafting.draft(self.round, len(self.tokens), size)
        self.tokens.append(40 + self.round)
        hidden = bytes(feedback_bytes)
        feedback = common_pb2.Feedback(round=self.round, hidden=hidden) if hidden else None
        self.drafting.tell(self.tokens[-1:], feedback)
        return drafted


async def test_rounds_go_on_while_a_drafter_is_opened_late() -> None:
    fake = Fake()
    text = Text([fake])
    assert await text.go(NONE) is None
    assert not fake.opened
    for _ in range(3):
        assert await text.go(TWO) is None
        await asyncio.sleep(0)
    assert fake.opened == [1, 2, 3, 41]  # the text as it was when a draft was first wanted
    fake.may_open.set()
    await asyncio.sleep(0.01)
    drafted = await text.go(TWO)
    assert drafted is not None
    assert fake.asked == [(5, 4, [42, 43, 44])]
    await text.go(TWO)
    assert fake.asked[-1] == (6, 7, [45])


async def test_feedback_is_handed_on_once_and_the_newest_is_kept() -> None:
    """As much as a message holds: what is older is of no use without it."""
    fake = Fake()
    fake.may_open.set()
    text = Text([fake])
    for feedback_bytes in (30, 40, 40, MOST_BYTES - 40, 5, MOST_BYTES + 1):
        await text.go(NONE, feedback_bytes)
    await text.go(NONE, 20)
    await text.drafting.begin()
    await text.go(TWO, 60)
    await text.go(TWO, 60)
    await text.go(TWO)
    await text.go(TWO)
    assert fake.told == [[7], [8], [9], []]


async def test_one_that_is_opened_beside_the_target_is_waited_for() -> None:
    fake = Fake()
    text = Text([fake])
    await text.drafting.begin()
    waiting = asyncio.create_task(text.go(TWO))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    fake.may_open.set()
    assert await waiting is not None
    assert fake.asked == [(1, 3, [])]


async def test_one_that_is_not_asked_for_long_is_let_go() -> None:
    first, second = Fake(), Fake()
    for fake in (first, second):
        fake.may_open.set()
    text = Text([first, second])
    await text.drafting.begin()
    await text.go(TWO)
    await asyncio.sleep(REST_SECONDS)
    await text.go(NONE)
    assert not first.cancelled
    await asyncio.sleep(1)
    await text.go(NONE)
    assert first.cancelled
    assert not second.opened
    assert await text.go(TWO) is None
    await asyncio.sleep(0.01)
    assert second.opened == [1, 2, 3, 41, 42, 43]
    assert await text.go(TWO) is not None
    assert second.asked == [(5, 6, [44])]
    assert not text.drafting.lost


async def test_where_there_is_none_it_is_lost_once() -> None:
    text = Text([None, None])
    assert await text.go(TWO) is None
    assert await text.go(TWO) is None
    assert text.drafting.lost
    assert text.losses == 1


async def test_a_rule_that_needs_one_says_so() -> None:
    text = Text([None], GREEDY_BLOCK)
    with pytest.raises(Unavailable, match="greedy_block needs a drafter"):
        await text.drafting.begin()


async def test_a_deadline_of_the_text_is_no_loss_of_the_drafter() -> None:
    """Others would lose theirs by a client who is in a hurry."""

    class Hurried(Fake):
        async def draft(self, *asked: Any) -> DraftReply:
            raise OutOfTime("the drafter did not answer before the deadline")

    hurried = Hurried()
    hurried.may_open.set()
    for rule in (BLOCK, GREEDY_BLOCK):
        text = Text([hurried], rule)
        await text.drafting.begin()
        with pytest.raises(OutOfTime):
            await text.go(TWO)
        assert not text.drafting.lost
        assert not text.losses


async def test_one_that_ended_a_silent_sequence_is_opened_again() -> None:
    class Full(Fake):
        async def draft(self, *asked: Any) -> DraftReply:
            raise SequenceIdled("the drafter ended an idle sequence")

    first, second = Full(), Fake()
    for fake in (first, second):
        fake.may_open.set()
    text = Text([first, second])
    await text.drafting.begin()
    assert await text.go(TWO) is None
    assert first.cancelled
    assert await text.go(TWO) is None
    await asyncio.sleep(0.01)
    assert await text.go(TWO) is not None
    assert text.drafting.lost
    assert not text.losses
