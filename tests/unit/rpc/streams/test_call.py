"""The status with which a peer ended a call, whatever grpc.aio raises for a write that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tandem.drafter.v1 import drafter_pb2
from tandem.errors import PeerFailure
from tandem.rpc.streams.call import SequenceCall
from tandem.rpc.streams.link import Link, _Status

OVERWRITTEN = (grpc.StatusCode.INTERNAL, "Internal error from Core")
REFUSED = (grpc.StatusCode.UNAVAILABLE, "the target is loading its model")


class EndingCall:
    """A call that is given statuses, one after the other."""

    def __init__(self) -> None:
        self.status: tuple[grpc.StatusCode, str] | None = None
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def end(self, status: tuple[grpc.StatusCode, str]) -> None:
        self.status = status
        for callback in self.callbacks:
            callback(self)

    async def code(self) -> grpc.StatusCode | None:
        return self.status[0] if self.status else None

    async def details(self) -> str | None:
        return self.status[1] if self.status else None


@pytest.mark.parametrize("order", [(REFUSED, OVERWRITTEN), (OVERWRITTEN, REFUSED), (REFUSED,)])
async def test_the_peers_own_status_counts(order: tuple[Any, ...]) -> None:
    call: Any = EndingCall()
    status = _Status(call)
    for given in order:
        call.end(given)
    assert await status.known() == REFUSED


async def test_a_failed_write_alone_is_a_bug() -> None:
    call: Any = EndingCall()
    status = _Status(call)
    call.end(OVERWRITTEN)
    assert await status.known() == OVERWRITTEN


async def test_an_internal_error_of_the_peer_stays_one() -> None:
    call: Any = EndingCall()
    status = _Status(call)
    failed = (grpc.StatusCode.INTERNAL, "the engine failed on this batch")
    call.end(failed)
    assert await status.known() == failed


class AnsweringCall(EndingCall):
    """A call whose peer answers with bytes that are no message: the library makes None of them."""

    async def write(self, message: bytes) -> None:
        """Takes anything."""

    async def done_writing(self) -> None:
        """Fine."""

    async def read(self) -> None:
        """No message."""

    def cancel(self) -> None:
        """Ends it."""
        self.end((grpc.StatusCode.CANCELLED, "by us"))


async def test_an_answer_that_is_no_message_breaks_the_contract() -> None:
    call: Any = AnsweringCall()
    link: Link[Any] = Link("drafter", "127.0.0.1:1", lambda: call)
    close, opening = drafter_pb2.SequenceRequest(), drafter_pb2.SequenceRequest()
    asking = SequenceCall(link, drafter_pb2.DraftRequest, close, None, 1 << 20)
    with pytest.raises(PeerFailure, match="the drafter broke the contract: its answer is no"):
        await asking.open(opening, "opened", 5)
    asking.cancel()
