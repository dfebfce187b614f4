"""Replicas behind a name: they come, go and die."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, ClassVar

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tandem.target.v1 import target_pb2
from tests.support.waiting import until
from tests.support.wire.fakes import FakeDrafter, FakeTarget
from tests.support.wire.fleet import NAME, Fleet, fleet, held, serves

__all__ = ["fleet"]  # a fixture of all files of replicas


async def test_texts_are_spread_over_the_replicas_of_a_name(fleet: Fleet) -> None:
    targets = FakeTarget(), FakeTarget(), FakeTarget()
    await fleet.start(*targets)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    async with held(*targets) as go_on:
        texts = [asyncio.ensure_future(fleet.text()) for _ in range(12)]
        await until(lambda: sum(target.opened for target in targets) == 12)
        assert [target.opened for target in targets] == [4, 4, 4]
        go_on.set()
        for text in texts:
            assert list((await text).token_ids) == targets[0].text(20)
    # One connection each: a replica's texts share a stream.
    assert [target.streams for target in targets] == [1, 1, 1]


async def test_one_that_comes_takes_work(fleet: Fleet) -> None:
    first, second = FakeTarget(), FakeTarget()
    await fleet.start(first)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    await fleet.text()
    await fleet.start(second)

    async def works() -> bool:
        await fleet.text()
        return second.opened > 0

    await until(works)


async def test_one_that_leaves_its_name_finishes_its_texts_and_gets_no_more(fleet: Fleet) -> None:
    leaving, staying = FakeTarget(), FakeTarget()
    await fleet.start(leaving)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    async with held(leaving) as go_on:
        text = asyncio.ensure_future(fleet.text())
        await until(lambda: leaving.opened == 1)
        fleet.names.records[NAME] = []
        await fleet.start(staying)
        await until(lambda: fleet.names.asked > 20)
        await until(lambda: serves(fleet, staying))
        before = leaving.opened
        for _ in range(10):
            await fleet.text()
        assert leaving.opened == before
        go_on.set()
        assert list((await text).token_ids) == leaving.text(20)


async def test_without_any_target_it_does_not_serve(fleet: Fleet) -> None:
    host, other = await fleet.start(FakeTarget(), FakeTarget())
    await fleet.orchestrate()
    await until(fleet.is_serving)
    await fleet.kill(host)
    for _ in range(5):
        await fleet.text()
    assert await fleet.is_serving()
    await fleet.kill(other)

    async def is_gone() -> bool:
        return not await fleet.is_serving()

    await until(is_gone)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await fleet.text()
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    await fleet.serve(host, FakeTarget())
    await until(fleet.is_serving)
    await fleet.text()


async def test_it_becomes_ready_where_one_of_several_is_away(fleet: Fleet) -> None:
    target = FakeTarget()
    await fleet.start(target)
    fleet.names.records[NAME].append("127.0.0.99")
    await fleet.orchestrate()
    await until(fleet.is_serving)
    for _ in range(5):
        await fleet.text()
    assert target.opened == 5


async def test_it_waits_for_nobody_who_has_left_before_he_answered(fleet: Fleet) -> None:
    """A name may still have a pod that is gone, and whose address answers nothing."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.99", fleet.port))
        mute.listen()
        fleet.names.records[NAME].append("127.0.0.99")
        await fleet.start(FakeTarget())
        await fleet.orchestrate(connect_seconds=5)
        await until(lambda: fleet.names.asked > 4)
        assert not await fleet.is_serving()
        fleet.names.records[NAME].remove("127.0.0.99")
        await until(fleet.is_serving)


class Hesitant(FakeTarget):
    """Fails the first questions for its tokenizer.

    Attributes:
        failures: with these.
    """

    failures: ClassVar = [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
    ]

    async def GetTokenizer(
        self, request: target_pb2.GetTokenizerRequest, context: Any
    ) -> target_pb2.GetTokenizerResponse:
        if self.failures:
            await context.abort(self.failures.pop(), "not now")
        return await super().GetTokenizer(request, context)


async def test_a_target_that_was_slow_to_give_its_tokenizer_is_asked_again(fleet: Fleet) -> None:
    """Its health says nothing of that, so no news of it comes."""
    await fleet.start(Hesitant())
    await fleet.orchestrate()
    await until(fleet.is_serving)
    assert not Hesitant.failures
    await fleet.text()


async def test_one_that_drains_is_left_at_once(fleet: Fleet) -> None:
    """Its health says so before its name does."""
    draining, other = FakeTarget(), FakeTarget()
    await fleet.start(draining, other)
    await fleet.orchestrate()
    await until(fleet.is_serving)
    await draining.health.drain()
    await until(lambda: serves(fleet, other))
    before = draining.opened
    for _ in range(10):
        await fleet.text()
    assert draining.opened == before


async def test_one_that_is_not_ready_yet_gets_no_text(fleet: Fleet) -> None:
    """Its name may have it while it loads, as that of a StatefulSet."""
    loading, other = FakeTarget(), FakeTarget()
    await fleet.start(loading)
    health = "tandem.target.v1.TargetService"
    await loading.health.set(health, health_pb2.HealthCheckResponse.NOT_SERVING)
    await fleet.orchestrate()
    await asyncio.sleep(0.3)
    assert not await fleet.is_serving()
    await fleet.start(other)
    await until(fleet.is_serving)
    assert await serves(fleet, other)
    await loading.health.set(health, health_pb2.HealthCheckResponse.SERVING)

    async def works() -> bool:
        await fleet.text(stopping={"max_new_tokens": 1})
        return loading.opened > 0

    await until(works)


async def test_without_drafters_texts_go_on_plainly_and_ready(fleet: Fleet) -> None:
    drafter = FakeDrafter()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    await fleet.serve("127.0.0.1", drafter, port)
    await fleet.start(FakeTarget())
    await fleet.orchestrate(drafters=(f"127.0.0.1:{port}",))
    await until(fleet.is_serving)
    drafting = {"gamma": 4}
    assert max((await fleet.text(speculation=drafting)).summary.gammas) == 4
    await fleet.kill("127.0.0.1")

    async def is_plain() -> bool:
        summary = (await fleet.text(speculation=drafting)).summary
        # A drafter that comes back may draft the rest of a text that began without it.
        assert summary.drafter_lost is not (summary.gammas[1] > 0)
        return not any(summary.gammas)

    await until(is_plain)
    assert await fleet.is_serving()
    with pytest.raises(grpc.aio.AioRpcError, match="greedy_block needs a drafter"):
        await fleet.text(speculation={"verifier": "greedy_block", "gamma": 4})
    await fleet.serve("127.0.0.1", drafter, port)

    async def drafts() -> bool:
        return not await is_plain()

    await until(drafts)
