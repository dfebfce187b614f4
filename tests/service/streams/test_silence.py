"""Silent sequences that hold a place: when others wait, the longest silent loses it first."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.target.v1 import target_pb2, target_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.steps import draft_step, open_draft, open_verify, verify_step
from tests.support.wire.talk import Talk

PLACES = 4
# Much shorter than the idle limit, which nothing here reaches.
PATIENCE = 0.5
_LIMITS: dict[str, Any] = {
    "max_sequences": PLACES,
    "max_gamma": 8,
    "idle_seconds": 60,
    "full_idle_seconds": PATIENCE,
    "admission_seconds": 20,
}


@dataclass
class Full:
    """A service whose places are all taken, the first by the first."""

    stub: Any
    held: list[Talk]
    call: Callable[[], Any]
    opening: Callable[..., Any]
    step: Callable[..., Any]
    info: Any

    async def open_sequences(self) -> int:
        return int((await self.stub.GetModelInfo(self.info)).stats.open_sequences)

    async def opened(self) -> Talk:
        talk = Talk(self.call())
        answer = await talk.ask(self.opening())
        assert answer is not grpc.aio.EOF, await talk.end()
        assert answer.HasField("opened")
        return talk


@pytest.fixture(params=["drafter", "target"])
async def full(
    request: pytest.FixtureRequest, random_pair: tuple[Path, Path]
) -> AsyncIterator[Full]:
    drafts = request.param == "drafter"
    async with AsyncExitStack() as stack:
        server = await start(
            stack,
            make_drafter(DrafterSettings(model=str(random_pair[0]), **_LIMITS))
            if drafts
            else make_target(TargetSettings(model=str(random_pair[1]), **_LIMITS)),
        )
        channel = await connect(stack, address_of(server))
        await server.ready()
        stub: Any
        if drafts:
            stub = drafter_pb2_grpc.DrafterServiceStub(channel)
            ask = drafter_pb2.GetModelInfoRequest()
            found = Full(stub, [], stub.Draft, open_draft, draft_step, ask)
        else:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            asked = target_pb2.GetModelInfoRequest()
            found = Full(stub, [], stub.Verify, open_verify, verify_step, asked)
        for _ in range(PLACES):
            found.held.append(await found.opened())
        yield found
        for talk in found.held:
            talk.cancel()


async def test_who_is_silent_keeps_its_place_where_nobody_waits(full: Full) -> None:
    await asyncio.sleep(2 * PATIENCE)
    assert await full.open_sequences() == PLACES
    for talk in full.held:
        assert await talk.ask(full.step()) is not grpc.aio.EOF


async def test_the_longest_silent_gives_way_to_one_that_waits(full: Full) -> None:
    """One for each that waits, after the time that is said and long before the idle limit."""
    async with asyncio.timeout(HANG_SECONDS):
        newcomer = await full.opened()
        code, sentence = await full.held[0].end()
    assert code == grpc.StatusCode.ABORTED
    said = re.fullmatch(r"no request for ([\d.]+) s, and others wait for the place; .*", sentence)
    assert said is not None, sentence
    assert float(said[1]) >= PATIENCE
    assert await full.open_sequences() == PLACES
    for talk in (*full.held[1:], newcomer):
        assert await talk.ask(full.step()) is not grpc.aio.EOF
    newcomer.cancel()


async def test_many_that_wait_get_the_places_of_many(full: Full) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        newcomers = await asyncio.gather(*(full.opened() for _ in range(PLACES)))
        ends = [await talk.end() for talk in full.held]
    assert [code for code, _ in ends] == [grpc.StatusCode.ABORTED] * PLACES
    assert await full.open_sequences() == PLACES
    for talk in newcomers:
        talk.cancel()


async def test_who_goes_on_never_gives_way(full: Full) -> None:
    """Also the one whose place is the oldest."""
    first, *others = full.held
    newcomer = asyncio.create_task(full.opened())
    round_, position = 0, None
    while not newcomer.done():
        round_ += 1
        answer = await first.ask(next_step(full, round_, position))
        assert answer is not grpc.aio.EOF, await first.end()
        position = next_position(answer)
        await asyncio.sleep(PATIENCE / 5)
    ends = {asyncio.create_task(talk.end()): talk for talk in others}
    over, going = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    assert [ends[end] for end in over] == others[:1], "the longest silent one, and no other"
    for end in going:
        end.cancel()
    (await newcomer).cancel()


def next_step(full: Full, round_: int, position: int | None) -> Any:
    """Steps that emit one token each, so that many fit."""
    if position is None:
        position = 3 if full.step is draft_step else 4
    if full.step is draft_step:
        return draft_step(round=round_, position=position, gamma=1)
    return verify_step(round=round_, position=position, draft=None)


def next_position(answer: Any) -> int:
    kind = answer.WhichOneof("result")
    return int(getattr(answer, kind).position)
