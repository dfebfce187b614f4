"""The carrier of sequences' messages, on the side of a caller: those of one peer share streams."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc

from tandem.errors import PeerFailure, TandemError
from tandem.rpc.status import from_peer
from tandem.rpc.streams.entries import StepResponse
from tandem.rpc.streams.outbox import Outbox

# That share a stream; what a message costs is then shared well enough.
SEQUENCES_A_STREAM = 64
# How long a peer may take to take a message in, or to end a stream that we have ended.
_WRITE_SECONDS = 30.0
_END_SECONDS = 1.0
# How long a stream that all have left is kept for the next one: to open another takes 1.5 ms. Less
# than a service bears an empty one (EMPTY_SECONDS).
_LINGER_SECONDS = 5.0
# After so long others join a younger one, on a connection that is younger too where the service
# bounds their age.
_LONGEST_SECONDS = 60.0
# How long the status of a call that has failed may be on its way.
_STATUS_SECONDS = 1.0
# What grpc.aio makes of a write that fails, whatever the call's own status is or will be.
_WRITE_FAILED = "Internal error from Core"

T = TypeVar("T")


R = TypeVar("R", bound=StepResponse)


class Link(Generic[R]):
    """A peer's streams. One is opened when a sequence needs it, and ended a while after its last.

    Attributes:
        role: "drafter" or "target", for sentences.
        address: of the peer, for the log.

    Args:
        start: opens a stream, which takes encoded messages and gives lists of `responses`.
    """

    def __init__(self, role: str, address: str, start: Callable[[], Any]) -> None:
        self.role = role
        self.address = address
        self._start = start
        self._streams: list[SharedStream[R]] = []
        self._started = 0

    def join(self, after: int = 0) -> SharedStream[R]:
        """A stream with a free place.

        Args:
            after: the stream has to be younger than the one of this number.
        """
        for stream in self._streams:
            if stream.age > _LONGEST_SECONDS:
                stream.retire()
        self._streams = [stream for stream in self._streams if stream.goes_on]
        free = [
            stream
            for stream in self._streams
            if stream.number > after and stream.count < SEQUENCES_A_STREAM
        ]
        if free:
            # The fullest, so that messages share writes, and those of a burst run empty.
            return max(free, key=lambda stream: stream.count)
        self._started += 1
        stream = SharedStream(self, self._start(), self._started)
        self._streams.append(stream)
        return stream

    async def drain(self) -> None:
        """Return when the last sequence has left; none is to join any more."""
        while streams := [stream for stream in self._streams if not stream.ended]:
            for stream in streams:
                stream.retire()
            await asyncio.sleep(_END_SECONDS)

    async def close(self) -> None:
        """End all streams, those too that are kept for later."""
        streams, self._streams = self._streams, []
        await asyncio.gather(*(stream.close() for stream in streams))


class SharedStream(Generic[R]):
    """One stream and who waits for answers on it.

    Attributes:
        number: of its link's, counted from 1.
    """

    def __init__(
        self, link: Link[R], call: grpc.aio.StreamStreamCall[Any, Any], number: int
    ) -> None:
        self.number = number
        self._link = link
        self._call = call
        self._status = _Status(call)
        self._outbox = Outbox()
        self._last = 0
        # Of each member, the requests it has put into the outbox.
        self._members: dict[int, int] = {}
        self._waiting: dict[int, asyncio.Future[R]] = {}
        # Answers that are still to come, and those that have come before they were waited for.
        self._owed: dict[int, int] = {}
        self._early: dict[int, deque[R]] = {}
        self._ended: dict[int, R] = {}
        self._failure: Callable[[], TandemError] | None = None
        self._retired = False
        self._opened = time.monotonic()
        self._lingering: asyncio.TimerHandle | None = None
        self._tasks = [asyncio.create_task(work) for work in (self._read(), self._write())]

    @property
    def goes_on(self) -> bool:
        """Whether another sequence may join."""
        return self._failure is None and not self._retired

    @property
    def ended(self) -> bool:
        """Whether nothing comes on it any more."""
        return self._tasks[0].done()

    @property
    def age(self) -> float:
        """Seconds since it was opened."""
        return time.monotonic() - self._opened

    @property
    def count(self) -> int:
        """Sequences on it now."""
        return len(self._members)

    def enter(self) -> int:
        """Join, as the sequence of the number that comes back. Its first request has to follow."""
        if self._lingering is not None:
            self._lingering.cancel()
        self._last += 1
        self._members[self._last] = 0
        return self._last

    def send(self, number: int, message: bytes, answers: int = 1) -> None:
        """Have a member's encoded request written, which has a known number of answers."""
        self._members[number] += 1
        self._owed[number] = self._owed.get(number, 0) + answers
        self._outbox.put(message, number)

    def has_answer(self, number: int) -> bool:
        """Whether an answer to a member, or the end of it, has come and was not taken."""
        ended = number in self._ended or self._failure is not None
        return bool(self._early.get(number)) or ended

    def answer(self, number: int) -> asyncio.Future[R]:
        """The next answer to a member; its end, if that has come already.

        Raises:
            TandemError: what the stream ended with; the future may have it too.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        if early := self._early.get(number):
            future.set_result(early.popleft())
        elif self._failure is not None:
            raise self._failure()
        elif (ended := self._ended.get(number)) is not None:
            future.set_result(ended)
        else:
            self._waiting[number] = future
        return future

    def leave(self, number: int, close: bytes = b"") -> None:
        """Take no more answers for a member. A while after the last one has left, the stream ends.

        Args:
            number: the member's.
            close: to be written, unless the service has never heard of it, or ended it.
        """
        unsent = self._outbox.discard(number)
        if close and self._members[number] > unsent and number not in self._ended:
            self._outbox.put(close)
        del self._members[number]
        for kept in (self._waiting, self._owed, self._early, self._ended):
            kept.pop(number, None)
        if not self._members:
            seconds = 0.0 if self._retired else _LINGER_SECONDS
            self._lingering = asyncio.get_running_loop().call_later(seconds, self.retire)

    def retire(self) -> None:
        """Let none join any more, and end with the last member."""
        self._retired = True
        if not self._members:
            self._outbox.finish()
            asyncio.get_running_loop().call_later(_END_SECONDS, self._call.cancel)

    async def close(self) -> None:
        """End it now, with its members."""
        self._retired = True
        if self._lingering is not None:
            self._lingering.cancel()
        self._call.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        message: Any
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if message is None:  # what the library makes of bytes that it cannot read
                    self._fail(lambda: broken(self._link, "its answer is no message"))
                    self._call.cancel()
                    return
                for response in message.responses:
                    self._hand_on(response)
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # its status says why
        code, details = await self._status.known()
        self._fail(lambda: from_peer(self._link.role, self._link.address, code, details))

    async def _write(self) -> None:
        try:
            await self._outbox.pour(self._call.write, _WRITE_SECONDS, self._call.cancel)
            await self._call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # the reader sees why

    def _hand_on(self, response: R) -> None:
        """Give an answer to who waits for it. An end may come unasked; it is kept."""
        number = response.sequence
        if number not in self._members:
            return
        future = self._waiting.pop(number, None)
        waited_for = future is not None and not future.done()
        if future is not None and waited_for:
            future.set_result(response)
        if response.WhichOneof("result") == "ended":
            self._ended[number] = response
        elif owed := self._owed.get(number, 0):  # what was not asked for is dropped
            self._owed[number] = owed - 1
            if not waited_for:
                self._early.setdefault(number, deque()).append(response)

    def _fail(self, failure: Callable[[], TandemError]) -> None:
        self._failure = failure
        self._tasks[1].cancel()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(failure())
        self._waiting.clear()


def broken(link: Link[Any], sentence: str) -> PeerFailure:
    """The error of an answer that no peer may give."""
    error = PeerFailure(f"the {link.role} broke the contract: {sentence}")
    error.add_note(f"{link.role} {link.address}")
    return error


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
