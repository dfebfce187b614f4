"""Clients that do not read their answers: which resources they hold, and for how long."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import pytest

from orchestrator.front.service import make_service
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import CLIENT_OPTIONS
from tandem.rpc.server import RunningServer
from tests.service.requests.test_overload import Gate
from tests.support.waiting import HANG_SECONDS, until
from tests.support.wire.fakes import (
    FakeDrafter,
    FakeTarget,
    generation,
    orchestrate,
    request,
    serve_fakes,
)


class Pulse:
    """Tells when a target makes no round any more: nobody reads what its texts have."""

    def __init__(self, target: FakeTarget) -> None:
        self._rounds = 0
        target.interfere = self._count

    async def _count(self, round_: int | None, context: Any) -> None:
        self._rounds += 1

    async def stopped(self) -> None:
        before, now = -1, 0
        while before != now:
            before = now
            await asyncio.sleep(0.2)
            now = self._rounds


async def test_a_text_that_is_not_read_gives_way_to_one_that_waits() -> None:
    """The one that was not read for the longest, and no more than one for each that waits."""
    long = 10**6
    drafter, target = FakeDrafter(max_length=long), FakeTarget(max_length=long, max_sequences=2)
    pulse = Pulse(target)
    window = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with orchestrate(
        drafter, target, channel_options=window, idle_seconds=60, full_idle_seconds=0.3
    ) as stub:
        endless = pb.GenerateRequest(generation=generation(stopping={"max_new_tokens": 10**5}))
        first = stub.Generate(endless)
        await until(lambda: target.opened == 1)
        await pulse.stopped()
        second = stub.Generate(endless)
        await until(lambda: target.opened == 2)
        await pulse.stopped()
        await asyncio.sleep(0.5)
        assert not first.done(), "nobody waits"
        assert not second.done()
        reply = await stub.Complete(request(), timeout=HANG_SECONDS)
        assert list(reply.token_ids) == target.text(20)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in first:
                pass
        assert ended.value.code() == grpc.StatusCode.ABORTED
        said = re.match(
            r"the client read nothing for ([\d.]+) s, and others wait for its place; resume",
            str(ended.value.details()),
        )
        assert said is not None
        assert float(said[1]) >= 0.3
        for _ in range(1000):
            assert (await second.read()) is not grpc.aio.EOF
        second.cancel()


async def test_a_drain_does_not_wait_for_who_reads_nothing() -> None:
    """It waits for a text that moves, however long that takes."""
    long = 10**6
    target = FakeTarget(max_length=long)
    pulse = Pulse(target)
    window = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with serve_fakes(
        FakeDrafter(max_length=long), target, idle_seconds=10**6, full_idle_seconds=0.3
    ) as chosen:
        server = RunningServer("127.0.0.1:0", make_service(chosen))
        await server.start()
        await server.ready()
        options = (*CLIENT_OPTIONS, *window)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options) as channel:
            stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            endless = generation(stopping={"max_new_tokens": 10**5})
            unread = stub.Generate(pb.GenerateRequest(generation=endless))
            await until(lambda: target.opened == 1)
            await pulse.stopped()
            moving = aiter(stub.Generate(pb.GenerateRequest(generation=generation())))
            tokens = [token.id for token in (await anext(moving)).round.tokens]
            await asyncio.wait_for(server.stop(10**6), HANG_SECONDS)
            tokens += [token.id async for reply in moving for token in reply.round.tokens]
            assert tokens == target.text(20)
            with pytest.raises(grpc.aio.AioRpcError):  # no status goes out after what is unread
                async for _ in unread:
                    pass


async def test_a_text_that_is_not_read_keeps_its_place_for_a_while() -> None:
    long = 10**6
    target = FakeTarget(max_length=long, max_sequences=1)
    pulse = Pulse(target)
    window = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with orchestrate(
        FakeDrafter(max_length=long),
        target,
        channel_options=window,
        idle_seconds=60,
        full_idle_seconds=60,
    ) as stub:
        endless = generation(stopping={"max_new_tokens": 10**5})
        unread = stub.Generate(pb.GenerateRequest(generation=endless))
        await until(lambda: target.opened == 1)
        await pulse.stopped()
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.Complete(request(), timeout=1)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        for _ in range(1000):
            assert (await unread.read()) is not grpc.aio.EOF
        unread.cancel()


async def test_a_text_that_is_read_never_gives_way() -> None:
    target = FakeTarget(max_sequences=1)
    gate = Gate(target)
    async with orchestrate(FakeDrafter(), target, full_idle_seconds=0.5) as stub:
        call = stub.Generate(pb.GenerateRequest(generation=generation()))
        await until(lambda: gate.inside == 1)
        waiting = asyncio.ensure_future(stub.Complete(request()))
        await asyncio.sleep(1.0)  # it is the target that takes so long
        gate.open.set()
        assert [reply async for reply in call][-1].HasField("summary")
        await waiting


async def read_now_and_then(call: Any) -> None:
    while True:
        for _ in range(20):
            await call.read()
        await asyncio.sleep(0.1)


async def test_a_client_that_reads_now_and_then_is_left_in_the_end() -> None:
    drafter, target = FakeDrafter(max_length=10**6), FakeTarget(max_length=10**6)
    window = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with orchestrate(
        drafter, target, channel_options=window, idle_seconds=0.3, reading_seconds=0.6
    ) as stub:
        endless = generation(stopping={"max_new_tokens": 10**5})
        call = stub.Generate(pb.GenerateRequest(generation=endless))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await read_now_and_then(call)
        assert ended.value.code() == grpc.StatusCode.ABORTED
        assert "the text waited 0.6 s for its client in all" in str(ended.value.details())
        await until(lambda: (drafter.ended, target.ended) == (1, 1))


async def test_a_call_whose_end_is_not_read_counts_until_it_is_over() -> None:
    """Its text has ended, and its places are free."""
    long = 10**6
    target = FakeTarget(max_length=long)
    window = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    async with orchestrate(
        FakeDrafter(max_length=long),
        target,
        channel_options=window,
        idle_seconds=0.3,
        max_requests=1,
    ) as stub:
        endless = generation(stopping={"max_new_tokens": 10**5})
        unread = stub.Generate(pb.GenerateRequest(generation=endless))
        await until(lambda: target.ended == 1)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request(), timeout=HANG_SECONDS)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        unread.cancel()

        async def code() -> Any:
            return await stub.Complete(request(), timeout=HANG_SECONDS).code()

        async with asyncio.timeout(HANG_SECONDS):
            while await code() == grpc.StatusCode.RESOURCE_EXHAUSTED:  # noqa: ASYNC110  # a server
                await asyncio.sleep(0.05)
        assert await code() == grpc.StatusCode.OK
