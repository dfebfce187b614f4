"""A connection to the process at an address, which moves when credentials change or it is old."""

from __future__ import annotations

import asyncio
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from tandem.errors import TandemError
from tandem.rpc.channel import Dialer
from tandem.rpc.health import HealthWatch
from tandem.rpc.status import from_peer, notes_of
from tandem.rpc.streams.link import Link

_log = structlog.get_logger(__name__)

# Between two looks at the files of TLS, where there are any.
_LOOK_SECONDS = 1.0
# Before a newer connection is tried once more that a peer has not taken.
_AGAIN_SECONDS = 10.0
# For which an old connection takes sequences that were asked for before it was left.
_HANDOVER_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class _Connection:
    """A channel, what runs over it, and the version of the dialer that made it. It is left at
    `old_at`, if a newer one is there, and not used after `over_at`; both by time.monotonic()."""

    channel: grpc.aio.Channel
    stub: Any
    link: Link[Any]
    version: int
    old_at: float
    over_at: float

    async def close(self) -> None:
        """End the streams, and close the channel."""
        await self.link.close()
        await self.channel.close()


class Peer(ABC):
    """The process at an address.

    When the dialer's credentials change, or the channel is old, new sequences and calls go over a
    new channel, as soon as the peer has answered on it; those under way end on the old one. A
    channel of twice the age allowed takes nothing new, even if no newer one was answered.

    Attributes:
        role: what it is to be, for sentences.
        address: host:port, or the socket of a path.

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
        # Not all orchestrators, and not all connections of one, at once.
        age = self._dialer.age_seconds * random.uniform(0.9, 1.0)
        now = time.monotonic()
        return _Connection(channel, *self._over(channel), version, now + age, now + 2 * age)

    @abstractmethod
    def _over(self, channel: grpc.aio.Channel) -> tuple[Any, Link[Any]]:
        """A stub and a link over a channel."""

    async def health(self, seconds: float) -> AsyncGenerator[bool, None]:
        """Whether it serves, now and whenever that changes, until it stops.

        Args:
            seconds: that the first answer may take.

        Raises:
            TandemError: it cannot be reached, or no more.
        """
        if self._now.version != self._dialer.version or time.monotonic() > self._now.old_at:
            self._move_to(self._dial())
        watch = self._watch(self._now)
        try:
            serving = await watch.first(seconds)
            while serving is not None:
                yield serving
                change = asyncio.create_task(watch.next())
                try:
                    newer = await self._renewed(change, seconds)
                    if newer is None:
                        serving = await change
                        continue
                finally:
                    change.cancel()
                watch.end()
                watch, serving = newer
        finally:
            watch.end()

    def _watch(self, connection: _Connection) -> HealthWatch:
        return HealthWatch(self.role, self.address, self._service, connection.channel)

    async def _renewed(
        self, change: asyncio.Task[bool | None], seconds: float
    ) -> tuple[HealthWatch, bool | None] | None:
        """Wait for a change, and meanwhile move to a newer connection when it is time to.

        Returns:
            The watch on such a connection, with its first answer; None when there is a change.

        Raises:
            TandemError: the present one is over, and the peer has not answered on a newer one.
        """
        tried, again_at = self._now.version, self._now.old_at
        while not await self._is_done(change, again_at):
            version = self._dialer.version
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
                if not isinstance(error, TandemError) or time.monotonic() > self._now.over_at:
                    raise
                # Files are not changed everywhere at once, and the old connection stands.
                _log.warning(
                    "a newer connection is not taken yet",
                    role=self.role,
                    address=self.address,
                    reason=f"{error}; {notes_of(error)}",
                )
                continue
            self._move_to(newer)
            return watch, serving
        return None

    async def _is_done(self, change: asyncio.Task[bool | None], until: float) -> bool:
        """Wait for a change until a time, but where credentials may change, look after them now and
        then."""
        left = max(until - time.monotonic(), 0.0)
        timeout = min(left, _LOOK_SECONDS) if self._dialer.renews else left
        done, _ = await asyncio.wait((change,), timeout=None if timeout == math.inf else timeout)
        return bool(done)

    def _move_to(self, newer: _Connection) -> None:
        """Begin all that is new there, and leave the old connection after its last text."""
        older, self._now = self._now, newer
        self._leaving[older] = asyncio.create_task(self._leave(older))

    async def _leave(self, older: _Connection) -> None:
        # A caller that has asked for a sequence has begun it by then.
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
