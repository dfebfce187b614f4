"""How an orchestrator's texts share streams, and what becomes of them when a stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tandem.errors import Exhausted
from tandem.rpc.streams import call as call_module
from tandem.rpc.streams import link
from tandem.rpc.streams.call import SequenceCall
from tandem.target.v1 import target_pb2
from tests.support.wire.fake_carrier import FakeContext
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request

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
    drafter, target = FakeDrafter(max_sequences=16), FakeTarget(max_sequences=16)
    target.interfere, _ = gate(1, 10)
    async with orchestrate(drafter, target) as stub:
        replies = await asyncio.gather(*(stub.Complete(request()) for _ in range(10)))
        assert all(list(reply.token_ids) == target.text(20) for reply in replies)
        assert (drafter.streams, target.streams) == (3, 3)
        assert (drafter.opened, target.opened) == (10, 10)
        # They are kept for a while: the next text has one of theirs.
        await stub.Complete(request())
        assert (drafter.streams, target.streams) == (3, 3)
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


async def test_an_end_that_comes_unasked_is_heard() -> None:
    """A service may end a sequence as idle while its text waits for something else."""
    drafter, targets = FakeDrafter(), (FakeTarget(), FakeTarget())

    async def end_behind(at: int | None, context: FakeContext) -> None:
        if at == 1 and sum(target.opened for target in targets) == 1:
            context.end_later(Code.ABORTED, "no request for 0.3 s")

    for target in targets:
        target.interfere = end_behind

    async def pause(at: int | None, context: FakeContext) -> None:
        if at == 2:
            await asyncio.sleep(0.1)

    drafter.interfere = pause
    async with orchestrate(drafter, *targets) as stub:
        reply = await stub.Complete(request())
        assert list(reply.token_ids) == targets[0].text(20)
    assert sorted(target.opened for target in targets) == [1, 1]


async def test_a_stream_that_does_not_answer_attracts_no_more_texts() -> None:
    drafter, target = FakeDrafter(), FakeTarget()
    silent = asyncio.Event()

    async def ignore(at: int | None, context: FakeContext) -> None:
        if target.streams == 1 and at == 1:
            silent.set()
            await asyncio.sleep(60)

    target.interfere = ignore
    async with orchestrate(drafter, target, verify_seconds=0.3) as stub:
        first = asyncio.ensure_future(stub.Complete(request()))
        await silent.wait()
        second = asyncio.ensure_future(stub.Complete(request()))
        for text in (first, second):
            with pytest.raises(grpc.aio.AioRpcError):
                await text
        for _ in range(3):
            assert list((await stub.Complete(request())).token_ids) == target.text(20)
    assert target.streams > 1


async def test_a_stream_that_does_not_say_goodbye_is_left_for_a_fresh_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_module, "CLOSE_SECONDS", 0.1)
    peer: link.Link[Any] = link.Link("target", "", SilentCall)
    sequence = openings(peer, 1 << 20)
    sequence._join()
    first = peer.join()
    await sequence.close()
    assert peer.join() is not first


class SilentCall:
    """A stream whose writes are held back, and that answers nothing."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.written: list[target_pb2.SequenceRequest] = []
        self.noting: list[Callable[[Any], None]] = []

    async def write(self, message: bytes) -> None:
        await self.free.wait()
        self.written += target_pb2.VerifyRequest.FromString(message).requests

    async def read(self) -> Any:
        try:
            await asyncio.sleep(60)
        finally:  # its test is over: nobody waits for a status
            for note in self.noting:
                note(self)

    async def done_writing(self) -> None:
        """Fine."""

    async def code(self) -> grpc.StatusCode:
        return Code.CANCELLED

    async def details(self) -> str:
        return ""

    def add_done_callback(self, callback: Any) -> None:
        self.noting.append(callback)

    def cancel(self) -> None:
        """Nothing to end."""


def openings(peer: link.Link[Any], max_bytes: int) -> SequenceCall[Any, Any]:
    close = target_pb2.SequenceRequest(close=target_pb2.CloseSequence())
    return SequenceCall(peer, target_pb2.VerifyRequest, close, None, max_bytes)


async def test_what_was_given_up_before_it_was_sent_is_not_sent() -> None:
    call: Any = SilentCall()
    peer: link.Link[Any] = link.Link("target", "a:1", lambda: call)
    staying, *leaving = [openings(peer, 1 << 20) for _ in range(5)]
    tasks = []
    for one in (staying, *leaving):
        opening = target_pb2.SequenceRequest(open=target_pb2.OpenSequence(token_ids=[1]))
        tasks.append(asyncio.create_task(one.open(opening, "opened", 60)))
        await asyncio.sleep(0.01)  # the first is being written, the others wait
    for one, task in zip(leaving, tasks[1:], strict=True):
        task.cancel()
        one.cancel()
    call.free.set()
    await asyncio.sleep(0.01)
    assert [(r.sequence, r.WhichOneof("step")) for r in call.written] == [(1, "open")]
    tasks[0].cancel()
    staying.cancel()
    await asyncio.sleep(0.01)
    assert [r.WhichOneof("step") for r in call.written] == ["open", "close"]


async def test_a_close_that_could_not_be_written_in_time_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the peer would keep the sequence until its idle limit."""
    monkeypatch.setattr(call_module, "CLOSE_SECONDS", 0.05)
    call: Any = SilentCall()
    call.free.set()
    peer: link.Link[Any] = link.Link("target", "a:1", lambda: call)
    staying, leaving = openings(peer, 1 << 20), openings(peer, 1 << 20)
    tasks = []
    for one in (staying, leaving):
        opening = target_pb2.SequenceRequest(open=target_pb2.OpenSequence(token_ids=[1]))
        tasks.append(asyncio.create_task(one.open(opening, "opened", 60)))
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    call.free.clear()
    peer.join().send(1, b"")  # what is being written while the close waits
    await asyncio.sleep(0.01)
    await leaving.close()
    call.free.set()
    await asyncio.sleep(0.01)
    closed = [r.sequence for r in call.written if r.WhichOneof("step") == "close"]
    assert closed == [2]
    staying.cancel()


async def test_a_request_larger_than_the_peer_takes_fails_alone() -> None:
    """The peer would end the whole stream for it."""
    call: Any = SilentCall()
    peer: link.Link[Any] = link.Link("target", "a:1", lambda: call)
    opening = target_pb2.SequenceRequest(open=target_pb2.OpenSequence(token_ids=[1] * 5000))
    with pytest.raises(Exhausted, match="more than the target takes"):
        await openings(peer, 4096).open(opening, "opened", 60)
    assert not call.written


async def test_a_stream_that_all_have_left_ends_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And whoever joins before then is not cut off."""
    monkeypatch.setattr(link, "_LINGER_SECONDS", 0.1)
    call: Any = SilentCall()
    peer: link.Link[Any] = link.Link("target", "a:1", lambda: call)
    stream = peer.join()
    stream.leave(stream.enter())
    assert peer.join() is stream
    number = stream.enter()
    await asyncio.sleep(0.3)
    assert stream.goes_on
    stream.leave(number)
    assert stream.goes_on
    await asyncio.sleep(0.3)
    assert not stream.goes_on
    assert peer.join() is not stream


async def test_a_stream_that_is_retired_does_not_linger() -> None:
    """It may be what does not answer."""
    call: Any = SilentCall()
    peer: link.Link[Any] = link.Link("target", "a:1", lambda: call)
    stream = peer.join()
    number = stream.enter()
    stream.retire()
    stream.leave(number)
    assert peer.join() is not stream


async def test_the_fullest_stream_is_joined_and_an_old_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call: Any = SilentCall()
    peer: link.Link[Any] = link.Link("target", "a:1", lambda: call)
    monkeypatch.setattr(link, "SEQUENCES_A_STREAM", 3)
    streams = [peer.join() for _ in range(1)]
    numbers = [streams[0].enter() for _ in range(3)]
    streams.append(peer.join())
    streams[1].enter()
    streams[0].leave(numbers[0])
    assert peer.join() is streams[0]  # with two, and not the one with one
    monkeypatch.setattr(link, "_LONGEST_SECONDS", -1.0)
    assert peer.join() not in streams
    assert not any(stream.goes_on for stream in streams)
