"""`tandem.AsyncClient`: texts for code on an event loop."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, Unpack
from weakref import WeakSet

import grpc

from tandem.client.connection import CONNECT_SECONDS, INFO_SECONDS
from tandem.client.errors import CallFailed, Lost, Overloaded, failure_of, unconnected
from tandem.client.options import Options, Prompt, generation_of
from tandem.client.places import endpoints_of
from tandem.client.results import GeneratedRound, GeneratedText, round_of, text_of
from tandem.client.resumption import Resumption
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.endpoint import Endpoint


class AsyncClient:
    """As `Client`, on an event loop; of many texts at once they share one connection.

    Args:
        address: as for `Client`, and so are all others.

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
        self._channel: grpc.aio.Channel | None = None
        self._made: WeakSet[grpc.aio.Channel] = WeakSet()  # those left may have calls yet
        self._closed = False
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End its calls, for good. Harmless when it is closed."""
        self._closed, self._channel = True, None
        for channel in list(self._made):
            await channel.close()

    async def generate(
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
        async with self.stream(prompt, timeout_s=timeout_s, **options) as stream:
            async for _ in stream:
                pass
        return stream.result

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncRoundStream:
        """A text, round by round, as it is generated; see `generate`."""
        return AsyncRoundStream(self._events(generation_of(prompt, options), timeout_s))

    async def info(self) -> pb.GetModelInfoResponse:
        """What is served.

        Raises:
            CallFailed: no orchestrator answers, or it is not ready.
        """
        stub, endpoint = await self._connected()
        try:
            reply: pb.GetModelInfoResponse = await stub.GetModelInfo(
                pb.GetModelInfoRequest(), timeout=INFO_SECONDS, metadata=endpoint.metadata
            )
        except grpc.RpcError as error:
            raise failure_of(error) from error
        return reply

    async def _events(
        self, generation: pb.Generation, timeout_s: float | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        clock = asyncio.get_running_loop().time
        text = Resumption(generation, self._resume_seconds, timeout_s, clock, self._note)
        # One that broke since the last call, before anything came, is made again, once.
        stale = self._channel is not None
        while True:
            channel = None
            try:
                stub, endpoint = await self._connected(text.left)
                channel = self._channel
                async with aclosing(_replies(stub, endpoint, text)) as replies:
                    async for reply in replies:
                        stale = False
                        yield text.follow(reply)
                return
            except Lost as failure:
                if channel is not None and channel is self._channel:
                    self._channel = None  # calls of other texts on it go on
                    self._places.rotate(-1)
                if self._closed:
                    raise
                again = stale and not isinstance(failure, Overloaded)
                pause = 0.0 if again else text.pause(failure)
                stale = False
            except CallFailed as failure:
                pause = text.pause(failure)
            await asyncio.sleep(pause)

    async def _connected(self, left: float | None = None) -> tuple[Any, Endpoint]:
        """The first orchestrator that answers, beginning with the last that did.

        Args:
            left: seconds that the call has; None for any.

        Raises:
            Lost: none answers.
        """
        seconds = CONNECT_SECONDS if left is None else min(left, CONNECT_SECONDS)
        async with self._connecting:
            for tried in range(1, len(self._places) + 1):
                if self._closed:
                    raise Lost("CANCELLED: the client is closed", "CANCELLED")
                if self._channel is not None:
                    break
                try:
                    self._channel = await _connect(self._places[0], seconds)
                    self._made.add(self._channel)
                except Lost:
                    self._places.rotate(-1)
                    if tried == len(self._places):
                        raise
            assert self._channel is not None  # there is at least one place
            return orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel), self._places[0]


async def _connect(endpoint: Endpoint, seconds: float) -> grpc.aio.Channel:
    """A channel to somebody who answers, within some seconds.

    Raises:
        Lost: no orchestrator does.
        TimedOut: that was too short to know.
    """
    channel = endpoint.connect()
    try:
        async with asyncio.timeout(seconds):
            state = channel.get_state(try_to_connect=True)
            while state is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    raise unconnected(endpoint.address, in_time=True)
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError:
        await channel.close()
        raise unconnected(endpoint.address, in_time=seconds >= CONNECT_SECONDS) from None
    except BaseException:
        await channel.close()
        raise
    return channel


async def _replies(
    stub: Any, endpoint: Endpoint, text: Resumption
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """Those of one call. Closing the iterator early cancels it."""
    request, call = pb.GenerateRequest(generation=text.asked), None
    try:
        call = stub.Generate(request, timeout=text.left, metadata=endpoint.metadata)
        async for reply in call:
            yield reply
    except grpc.RpcError as error:
        raise failure_of(error) from error
    except grpc.aio.UsageError as error:  # a call on a channel that was closed
        raise Lost(f"CANCELLED: {error}", "CANCELLED") from error
    finally:
        if call is not None:
            call.cancel()


class AsyncRoundStream:
    """As `RoundStream`: iterate over it with `async for`, and use it with `async with`.

    Args:
        events: the text's messages.
    """

    def __init__(self, events: AsyncGenerator[pb.GenerateResponse, None]) -> None:
        self._events = events
        self._rounds: list[GeneratedRound] = []
        self._summary: pb.Summary | None = None

    async def __aiter__(self) -> AsyncIterator[GeneratedRound]:
        async for event in self._events:
            if event.HasField("summary"):
                self._summary = event.summary
            else:
                self._rounds.append(round_of(event.round))
                yield self._rounds[-1]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the text, unless it has ended."""
        await self._events.aclose()

    @property
    def result(self) -> GeneratedText:
        """The whole text, once all its rounds were read.

        Raises:
            RuntimeError: they were not.
        """
        if self._summary is None:
            raise RuntimeError("the text has not ended: read all of its rounds first")
        return text_of(self._rounds, self._summary)
