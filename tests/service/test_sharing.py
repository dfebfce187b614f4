"""How an orchestrator's texts share streams, and what becomes of them when a stream ends."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tandem.rpc import link
from tests.service.fakes import FakeContext, FakeDrafter, FakeTarget, orchestrate, request

Code = grpc.StatusCode


def gate(round_: int, count: int) -> tuple[Any, asyncio.Event]:
    """Hold texts back in a round until so many are there; tells when they are."""
    here, together = 0, asyncio.Event()

    async def interfere(at: int | None, context: FakeContext) -> None:
        nonlocal here
        if at == round_:
            here += 1
            if here == count:
                together.set()
            await together.wait()

    return interfere, together


async def test_texts_share_a_stream_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SEQUENCES_A_STREAM", 4)
    drafter, target = FakeDrafter(), FakeTarget()
    target.interfere, _ = gate(1, 10)
    async with orchestrate(drafter, target) as stub:
        replies = await asyncio.gather(*(stub.Complete(request()) for _ in range(10)))
        assert all(list(reply.token_ids) == target.text(20) for reply in replies)
        assert (drafter.streams, target.streams) == (3, 3)
        assert (drafter.opened, target.opened) == (10, 10)
        # None is left open behind the last text: the next has a stream of its own.
        await stub.Complete(request())
        assert (drafter.streams, target.streams) == (4, 4)
    assert (drafter.ended, target.ended) == (11, 11)


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.INTERNAL])
async def test_a_stream_that_ends_takes_its_texts_along(code: grpc.StatusCode) -> None:
    drafter, target = FakeDrafter(), FakeTarget()
    interfere, together = gate(2, 5)
    ending: list[Any] = []

    async def end(at: int | None, context: FakeContext) -> None:
        await interfere(at, context)
        if at == 2 and not ending:
            ending.append(context)
            context.end_stream(code, "at 10.0.0.7")

    target.interfere = end
    async with orchestrate(drafter, target) as stub:
        calls = [stub.Complete(request()) for _ in range(5)]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call
            assert failed.value.code() == code
            assert "10.0.0.7" not in str(failed.value.details())
        assert together.is_set()
        assert target.streams == 1
        reply = await stub.Complete(request())
        assert list(reply.token_ids) == target.text(20)
    assert (drafter.ended, target.ended) == (6, 6)


async def test_a_peer_that_takes_nothing_more_is_left_for_a_fresh_stream() -> None:
    """As one that drains: behind the same name another may answer."""
    drafter, target = FakeDrafter(), FakeTarget()
    interfere, together = gate(1, 1)
    go_on = asyncio.Event()

    async def drain(at: int | None, context: FakeContext) -> None:
        if together.is_set() and at is None and target.streams == 1:
            await context.abort(Code.UNAVAILABLE, "stopping")
        await interfere(at, context)
        if at == 1 and target.streams == 1:
            await go_on.wait()

    target.interfere = drain
    async with orchestrate(drafter, target) as stub:
        first = asyncio.ensure_future(stub.Complete(request()))
        await together.wait()
        second = await stub.Complete(request())
        assert list(second.token_ids) == target.text(20)
        assert target.streams == 2
        go_on.set()
        assert list((await first).token_ids) == target.text(20)


async def test_a_fresh_stream_is_tried_once() -> None:
    drafter, target = FakeDrafter(), FakeTarget()

    async def refuse(at: int | None, context: FakeContext) -> None:
        await context.abort(Code.UNAVAILABLE, "stopping")

    target.interfere = refuse
    async with orchestrate(drafter, target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request())
    assert refused.value.code() == Code.UNAVAILABLE
    assert target.opened == 1
