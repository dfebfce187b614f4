"""Client side of the drafter and the target: one object a peer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from orchestrator.calls import (
    DRAFT_METHOD,
    VERIFY_METHOD,
    CountingOn,
    DraftCall,
    VerifyCall,
    Waits,
)
from orchestrator.spans import TextSpans
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.errors import TandemError
from tandem.rpc.call import SequenceCall
from tandem.rpc.dialer import Dialer
from tandem.rpc.health_watch import HealthWatch
from tandem.rpc.link import Link
from tandem.rpc.status import from_peer, notes_of
from tandem.target.v1 import target_pb2, target_pb2_grpc

_log = structlog.get_logger(__name__)

# Between two looks at the files of TLS, where there are any.
_LOOK_SECONDS = 1.0
# Before credentials are tried once more that a peer has not taken.
_AGAIN_SECONDS = 10.0
# For which an old connection takes sequences that were asked for before it was left.
_HANDOVER_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class _Connection:
    """A channel, what runs over it, and the version of the dialer that made it."""

    channel: grpc.aio.Channel
    stub: Any
    link: Link[Any]
    version: int

    async def close(self) -> None:
        """End the streams, and close the channel."""
        await self.link.close()
        await self.channel.close()


class _Peer:
    """Whoever is at an address.

    Where the dialer's credentials change, what is begun from then on goes over a channel of its
    new ones, as soon as the peer has answered on it; what is under way ends where it is.

    Attributes:
        role: what it is to be, for sentences.
        address: see there.

    Args:
        dialer: makes its channels.
        host: that the address was found by, if by any.
    """

    role: str
    _service: str

    def __init__(self, address: str, dialer: Dialer | None = None, host: str = "") -> None:
        self.address = address
        self._dialer = dialer or Dialer()
        self._host = host
        self._now = self._dial()
        self._leaving: dict[_Connection, asyncio.Task[None]] = {}

    def _dial(self) -> _Connection:
        version = self._dialer.version
        channel = self._dialer.connect(self.address, self._host)
        return _Connection(channel, *self._over(channel), version)

    def _over(self, channel: grpc.aio.Channel) -> tuple[Any, Link[Any]]:
        """A stub and a link over a channel."""
        raise NotImplementedError

    async def health(self, seconds: float) -> AsyncGenerator[bool, None]:
        """Whether it serves, now and whenever that changes, until it stops.

        Args:
            seconds: that the first answer may take.

        Raises:
            TandemError: it cannot be reached, or no more.
        """
        if self._now.version != self._dialer.version:
            self._move_to(self._dial())
        watch = self._watch(self._now)
        try:
            serving = await watch.first(seconds)
            while serving is not None:
                yield serving
                news = asyncio.create_task(watch.next())
                try:
                    newer = await self._renewed(news, seconds)
                    if newer is None:
                        serving = await news
                        continue
                finally:
                    news.cancel()
                watch.end()
                watch, serving = newer
        finally:
            watch.end()

    def _watch(self, connection: _Connection) -> HealthWatch:
        return HealthWatch(self.role, self.address, self._service, connection.channel)

    async def _renewed(
        self, news: asyncio.Task[bool | None], seconds: float
    ) -> tuple[HealthWatch, bool | None] | None:
        """Wait for news, and meanwhile move to a connection of newer credentials.

        Returns:
            The watch on such a connection, with its first answer; None when there are news.
        """
        tried, again_at = self._now.version, math.inf
        while not await self._is_done(news):
            version = self._dialer.version
            if version == self._now.version:
                continue
            if version == tried and time.monotonic() < again_at:
                continue
            tried, again_at = version, time.monotonic() + _AGAIN_SECONDS
            newer = self._dial()
            watch = self._watch(newer)
            try:
                serving = await watch.first(seconds)
            except BaseException as error:
                watch.end()
                await newer.close()
                if not isinstance(error, TandemError):
                    raise
                # Files are not changed everywhere at once, and the old connection stands.
                _log.warning(
                    "new credentials are not taken yet",
                    role=self.role,
                    address=self.address,
                    reason=f"{error}; {notes_of(error)}",
                )
                continue
            self._move_to(newer)
            return watch, serving
        return None

    async def _is_done(self, news: asyncio.Task[bool | None]) -> bool:
        """Wait for news, but where credentials may change, look after them now and then."""
        timeout = _LOOK_SECONDS if self._dialer.renews else None
        done, _ = await asyncio.wait((news,), timeout=timeout)
        return bool(done)

    def _move_to(self, newer: _Connection) -> None:
        """Begin all that is new there, and leave the old connection behind its last text."""
        older, self._now = self._now, newer
        self._leaving[older] = asyncio.create_task(self._leave(older))

    async def _leave(self, older: _Connection) -> None:
        # Whoever has asked for a sequence has begun it by then.
        await asyncio.sleep(_HANDOVER_SECONDS)
        await older.link.drain()
        await older.close()
        del self._leaving[older]

    async def close(self) -> None:
        """End the streams, and close the channels."""
        leaving, self._leaving = self._leaving, {}
        for task in leaving.values():
            task.cancel()
        await asyncio.gather(*(one.close() for one in (self._now, *leaving)))

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_peer(self.role, self.address, error.code(), error.details()) from error


class DrafterClient(_Peer):
    """A drafter at an address."""

    role = "drafter"
    _service = "tandem.drafter.v1.DrafterService"

    def _over(self, channel: grpc.aio.Channel) -> tuple[Any, Link[Any]]:
        start: Any = channel.stream_stream(
            f"/{DRAFT_METHOD}", response_deserializer=drafter_pb2.DraftResponse.FromString
        )
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        return stub, Link(self.role, self.address, start)

    async def model_info(self, seconds: float) -> drafter_pb2.GetModelInfoResponse:
        """What it serves."""
        request = drafter_pb2.GetModelInfoRequest()
        reply: drafter_pb2.GetModelInfoResponse = await self._call(
            self._now.stub.GetModelInfo(request, timeout=seconds)
        )
        return reply

    def sequence(
        self,
        seconds: float | None,
        waits: Waits,
        spans: TextSpans,
        max_bytes: int,
        target_max_bytes: int,
        counting_on: CountingOn,
    ) -> DraftCall:
        """A fresh sequence, for at most `seconds`; of messages that it, and a target, takes."""
        close = drafter_pb2.SequenceRequest(close=drafter_pb2.CloseSequence())
        call = SequenceCall(self._now.link, drafter_pb2.DraftRequest, close, seconds, max_bytes)
        return DraftCall(call, waits, spans, target_max_bytes, counting_on)


class TargetClient(_Peer):
    """A target at an address."""

    role = "target"
    _service = "tandem.target.v1.TargetService"

    def _over(self, channel: grpc.aio.Channel) -> tuple[Any, Link[Any]]:
        start: Any = channel.stream_stream(
            f"/{VERIFY_METHOD}", response_deserializer=target_pb2.VerifyResponse.FromString
        )
        stub = target_pb2_grpc.TargetServiceStub(channel)
        return stub, Link(self.role, self.address, start)

    async def model_info(self, seconds: float) -> target_pb2.GetModelInfoResponse:
        """What it serves."""
        request = target_pb2.GetModelInfoRequest()
        reply: target_pb2.GetModelInfoResponse = await self._call(
            self._now.stub.GetModelInfo(request, timeout=seconds)
        )
        return reply

    async def tokenizer_json(self, seconds: float) -> bytes:
        """Its serialised tokenizer; empty where it has none."""
        call = self._now.stub.GetTokenizer(target_pb2.GetTokenizerRequest(), timeout=seconds)
        if await call.code() == grpc.StatusCode.NOT_FOUND:
            return b""
        reply: target_pb2.GetTokenizerResponse = await self._call(call)
        return reply.tokenizer_json

    def sequence(
        self,
        seconds: float | None,
        waits: Waits,
        spans: TextSpans,
        max_bytes: int,
        counting_on: CountingOn,
    ) -> VerifyCall:
        """A fresh sequence, for at most `seconds`; of messages that it takes."""
        close = target_pb2.SequenceRequest(close=target_pb2.CloseSequence())
        call = SequenceCall(self._now.link, target_pb2.VerifyRequest, close, seconds, max_bytes)
        return VerifyCall(call, waits, spans, counting_on)
