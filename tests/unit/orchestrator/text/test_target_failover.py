"""A text's target in runs: how many rounds are asked for ahead, and when."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.text.target_failover import TargetWithFailover
from tandem.peers.text.contracts import VerdictReply
from tandem.peers.text.values import Generation, Rule, Stopping
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tandem.telemetry.stages import StageTimes


class Fake:
    """A target that notes what it is asked for, and has rounds of a given length."""

    def __init__(self, round_ms: float) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.times = StageTimes(forward_ns=int(round_ms * 1e6))

    async def open(self, *of: Any) -> VerdictReply:
        return VerdictReply(0, 0, 9)

    async def verify(self, round_: int, position: int, drafted: None) -> VerdictReply:
        self.asked.append((round_, position, 1))
        return VerdictReply(0, 0, 9, times=self.times)

    def ask_rounds(self, round_: int, position: int, count: int, size: DraftSize) -> None:
        self.asked.append((round_, position, count))

    async def next_round(self, round_: int, position: int) -> tuple[None, VerdictReply]:
        return None, VerdictReply(0, 0, 9, times=self.times)


class Peers:
    def __init__(self, fake: Fake) -> None:
        self.fake = fake

    async def target(self) -> Fake:
        return self.fake


async def rounds(
    fake: Fake, count: int, promised: int = 1000, most: int = 32, strings: tuple[str, ...] = ()
) -> int:
    """Play so many; how many were asked for and not heard."""
    generation = Generation(
        "text",
        (1, 2, 3),
        Sampling(seed=1),
        Stopping(1000, strings=strings),
        "block",
        Rule("block"),
        0,
        0,
        (DraftSize(0),),
    )
    text = TargetWithFailover(generation, Peers(fake), 50, max_rounds=most)  # type: ignore[arg-type]
    await text.begin()
    text.tell([(await text.open()).next_token])
    for played in range(count):
        _, decided = await text.go_on(min(promised, 1000 - played))
        text.tell([decided.next_token])
    return text.ahead


@pytest.mark.parametrize(("round_ms", "ahead"), [(1, 30), (10, 3), (100, 2), (0.1, 32)])
async def test_before_a_stop_string_as_many_are_asked_for_as_take_thirty_milliseconds(
    round_ms: float, ahead: int
) -> None:
    """And never so few that the target waits for the next request."""
    fake = Fake(round_ms)
    left = await rounds(fake, 200, strings=("end",))
    assert 1 <= left <= ahead
    assert max(count for _, _, count in fake.asked) <= ahead
    assert sum(count for _, _, count in fake.asked) == 200 + left
    first, *others = fake.asked
    assert first[:2] == (1, 4)
    assert {other[:2] for other in others} == {(0, 0)}, "the run never ended"


async def test_where_only_the_target_ends_a_text_half_a_run_is_asked_for_at_once() -> None:
    """Of rounds of a second too: nothing can be computed in vain."""
    fake = Fake(1000)
    left = await rounds(fake, 200)
    assert 16 <= left <= 32
    first, *others = [count for _, _, count in fake.asked]
    assert (first, set(others)) == (32, {16})
    assert first + sum(others) == 200 + left


@pytest.mark.parametrize("bound", [{"promised": 1}, {"most": 1}, {"most": 0}])
async def test_no_more_are_asked_for_than_are_wanted(bound: dict[str, Any]) -> None:
    """A round alone is a step like another."""
    fake = Fake(1)
    assert await rounds(fake, 7, **bound) == 0
    assert fake.asked == [(round_, 3 + round_, 1) for round_ in range(1, 8)]


async def test_a_client_that_reads_no_more_has_no_more_asked_for() -> None:
    """Nobody waits for the next round then, and so nobody asks for others."""
    fake = Fake(1)
    left = await rounds(fake, 1)
    assert sum(count for _, _, count in fake.asked) == 1 + left <= 32
