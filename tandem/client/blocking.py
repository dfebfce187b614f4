"""`tandem.Client`: texts for code without an event loop."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self, Unpack
from weakref import WeakSet

from tandem.client.connection import CONNECT_SECONDS, Connection
from tandem.client.errors import CallFailed, Lost, Overloaded
from tandem.client.options import Options, Prompt, generation_of
from tandem.client.places import endpoints_of
from tandem.client.results import GeneratedRound, GeneratedText, round_of, text_of
from tandem.client.resumption import Resumption
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.rpc.endpoint import Endpoint


class Client:
    """Texts of an orchestrator, or of the first of several that answers.

    It connects with its first call, and may be used by several threads. A text whose orchestrator
    is lost goes on there later, or at another one; all must serve the same target.

    Args:
        address: HOST:PORT of an orchestrator, or of several, tried in turn; none is what the
            environment's TANDEM_ADDRESS says, or 127.0.0.1:50050.
        token: to send with each call; empty sends none.
        ca: file with the authorities that sign the servers' certificates (PEM); None is plaintext.
        certificate: file with the client's certificate (PEM), if servers ask for one.
        key: file with its private key (PEM).
        server_name: that servers' certificates must have; empty is the address's host.
        plaintext: the token may go to another machine without TLS.
        resume_seconds: how long a text whose orchestrator is lost tries to go on; 0 gives up.
        note: is called with a sentence about each loss.

    Raises:
        Misconfigured: the arguments contradict each other, or a file is not usable.
    """

    def __init__(
        self,
        *address: str,
        token: str = "",
        ca: str | os.PathLike[str] | None = None,
        certificate: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        server_name: str = "",
        plaintext: bool = False,
        resume_seconds: float = 30.0,
        note: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._places: deque[Endpoint] = deque(
            endpoints_of(
                address,
                token=token,
                ca=ca,
                certificate=certificate,
                key=key,
                server_name=server_name,
                plaintext=plaintext,
            )
        )
        self._resume_seconds, self._note = resume_seconds, note
        self._connection: Connection | None = None
        self._made: WeakSet[Connection] = WeakSet()  # those that were left may have calls yet
        self._closed = False
        self._lock = threading.Lock()

    @classmethod
    def of(
        cls,
        places: Sequence[Endpoint],
        resume_seconds: float = 30.0,
        note: Callable[[str], None] = lambda sentence: None,
    ) -> Client:
        """A client of endpoints."""
        client = cls(resume_seconds=resume_seconds, note=note)
        client._places = deque(places)
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End its calls, for good. Harmless when it is closed."""
        self._closed, self._connection = True, None
        for connection in list(self._made):
            connection.close()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> GeneratedText:
        """A whole text.

        Args:
            prompt: text, token ids, or a chat's messages with their role and content.
            timeout_s: seconds for the whole text.
            options: see `Options`.

        Raises:
            CallFailed: the call failed; its subclasses say how.
        """
        with self.stream(prompt, timeout_s=timeout_s, **options) as stream:
            for _ in stream:
                pass
        return stream.result

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> RoundStream:
        """A text, round by round, as it is generated; see `generate`."""
        return RoundStream(self.events(generation_of(prompt, options), timeout_s))

    def info(self) -> pb.GetModelInfoResponse:
        """What is served.

        Raises:
            CallFailed: no orchestrator answers, or it is not ready.
        """
        return self._connected().info()

    def events(
        self, generation: pb.Generation, timeout_s: float | None = None
    ) -> Iterator[pb.GenerateResponse]:
        """A text's messages. Closing the iterator early cancels the call.

        Args:
            generation: the request.
            timeout_s: for the whole text.

        Raises:
            CallFailed: the call's status; the loss's, if the text could not go on.
        """
        text = Resumption(generation, self._resume_seconds, timeout_s, time.monotonic, self._note)
        # One that broke since the last call, before anything came, is made again, once.
        stale = self._connection is not None
        while True:
            connection = None
            try:
                connection = self._connected(text.left)
                for reply in connection.generate(text.asked, text.left):
                    stale = False
                    yield text.follow(reply)
                return
            except Lost as failure:
                if connection is not None:
                    self._leave(connection)
                if self._closed:
                    raise
                again = stale and not isinstance(failure, Overloaded)
                pause = 0.0 if again else text.pause(failure)
                stale = False
            except CallFailed as failure:
                pause = text.pause(failure)
            time.sleep(pause)

    def _connected(self, left: float | None = None) -> Connection:
        """A connection to the first orchestrator that answers, beginning with the last that did.

        Args:
            left: seconds that the call has; None for any.

        Raises:
            Lost: none answers.
        """
        seconds = CONNECT_SECONDS if left is None else min(left, CONNECT_SECONDS)
        with self._lock:
            for tried in range(1, len(self._places) + 1):
                if self._closed:
                    raise Lost("CANCELLED: the client is closed", "CANCELLED")
                if self._connection is not None:
                    return self._connection
                connection = Connection(self._places[0])
                self._made.add(connection)
                try:
                    connection.open(seconds)
                    self._connection = connection
                except Lost:
                    self._places.rotate(-1)
                    if tried == len(self._places):
                        raise
            assert self._connection is not None  # there is at least one place
            return self._connection

    def _leave(self, connection: Connection) -> None:
        """Begin the next call elsewhere; calls of other threads go on."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
                self._places.rotate(-1)


class RoundStream:
    """The rounds of a text; iterate over it. Use it as a context manager, or close it, to cancel a
    text that is not read to its end. It belongs to one thread.

    Args:
        events: the text's messages.
    """

    def __init__(self, events: Iterator[pb.GenerateResponse]) -> None:
        self._events = events
        self._rounds: list[GeneratedRound] = []
        self._summary: pb.Summary | None = None

    def __iter__(self) -> Iterator[GeneratedRound]:
        for event in self._events:
            if event.HasField("summary"):
                self._summary = event.summary
            else:
                self._rounds.append(round_of(event.round))
                yield self._rounds[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the text, unless it has ended."""
        close = getattr(self._events, "close", None)
        if close is not None:
            close()

    @property
    def result(self) -> GeneratedText:
        """The whole text, once all its rounds were read.

        Raises:
            RuntimeError: they were not.
        """
        if self._summary is None:
            raise RuntimeError("the text has not ended: read all of its rounds first")
        return text_of(self._rounds, self._summary)
