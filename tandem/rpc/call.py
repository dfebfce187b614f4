"""Client side of a stream that is one sequence: a question, an answer, until close or cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, Protocol, TypeVar

import grpc

from tandem.errors import PeerFailure, TandemError, Unavailable
from tandem.rpc.patience import Patience
from tandem.rpc.status import from_peer

# How long a peer may take to say goodbye, before the stream is cancelled.
CLOSE_SECONDS = 1.0
# How long the status of a call that has failed may be on its way.
_STATUS_SECONDS = 1.0
# What grpc.aio makes of a write that fails, whatever the call's own status is or will be.
_WRITE_FAILED = "Internal error from Core"


class Reply(Protocol):
    """A response with a `result` oneof."""

    def WhichOneof(self, oneof_group: Any, /) -> Any:
        """The branch that is set."""


Q = TypeVar("Q")
R = TypeVar("R", bound=Reply)
T = TypeVar("T")


class SequenceCall(Generic[Q, R]):
    """One sequence's stream.

    A peer may be of another release, or broken. Its answers are compared with what was asked
    before anything is emitted, since nothing emitted can be taken back.

    Args:
        role: "drafter" or "target", for sentences.
        address: of the peer, for the log.
        call: the stream.
        close: the message that ends it.
    """

    def __init__(
        self, role: str, address: str, call: grpc.aio.StreamStreamCall[Q, R], close: Q
    ) -> None:
        self._role = role
        self._address = address
        self._call = call
        self._close_message = close
        self._patience = Patience()
        self._status = _Status(call)

    async def ask(self, request: Q, kind: str, seconds: float) -> R:
        """Send a request and wait for its answer.

        Raises:
            Unavailable: no answer in time.
            TandemError: what the peer ended the stream with means, or the answer is of another
                kind.
        """
        try:
            reply = await self._patience.bound(self._exchange(request), seconds)
        except TimeoutError:
            self.cancel()
            error = Unavailable(f"the {self._role} did not answer within {seconds:g} s; try again")
            error.add_note(f"{self._role} {self._address}")
            raise error from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as failure:
            raise await self._ended() from failure
        if reply is grpc.aio.EOF:
            raise await self._ended()
        if reply is None:  # what the library makes of bytes that it cannot read
            raise self.broken("its answer is no message")
        answer: R = reply
        if (got := answer.WhichOneof("result")) != kind:
            raise self.broken(f"result must be {kind}, got {got}")
        return answer

    async def _exchange(self, request: Q) -> Any:
        await self._call.write(request)
        return await self._call.read()

    async def _ended(self) -> TandemError:
        code, details = await self._status.known()
        return from_peer(self._role, self._address, code, details)

    def expect(self, field: str, value: int, least: int, most: int) -> None:
        """Refuse an answer that does not fit what was asked.

        Raises:
            PeerFailure: the value is out of its bounds.
        """
        if not least <= value <= most:
            bounds = str(least) if least == most else f"{least}..{most}"
            raise self.broken(f"{field} must be {bounds}, got {value}")

    def broken(self, sentence: str) -> PeerFailure:
        """The error of an answer that no peer may give."""
        error = PeerFailure(f"the {self._role} broke the contract: {sentence}")
        error.add_note(f"{self._role} {self._address}")
        return error

    async def close(self) -> None:
        """Say goodbye and wait for the end; a peer that is gone already is fine."""
        try:
            await self._patience.bound(self._say_goodbye(), CLOSE_SECONDS)
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
            self.cancel()
        finally:
            self._patience.close()

    async def _say_goodbye(self) -> None:
        await self._call.write(self._close_message)
        await self._call.done_writing()
        await self._call.read()

    def cancel(self) -> None:
        """Abort the sequence; the peer frees it. Never waits; harmless after the end."""
        self._patience.close()
        self._call.cancel()


class _Status:
    """The status that a call really ended with.

    A peer that refuses at once ends the call while our first message is on its way. The failed
    write then overwrites the peer's status with INTERNAL, or comes before it.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        self._call = call
        self._code: grpc.StatusCode | None = None
        self._details: str | None = None
        self._known = asyncio.Event()
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        """Called at each status that the call is given."""
        code, details = _at_once(call.code()), _at_once(call.details())
        if self._code is not None or details == _WRITE_FAILED:
            return
        self._code, self._details = code, details
        self._known.set()

    async def known(self) -> tuple[grpc.StatusCode | None, str | None]:
        """Code and details; if the peer's own do not come, whatever the call has."""
        try:
            async with asyncio.timeout(_STATUS_SECONDS):
                await self._known.wait()
        except TimeoutError:
            return await self._call.code(), await self._call.details()
        return self._code, self._details


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T | None:
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    coroutine.close()
    return None
