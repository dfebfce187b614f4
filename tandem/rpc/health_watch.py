"""A service's health, as the server at the other end of a channel tells it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import Unavailable
from tandem.rpc.status import from_peer


class HealthWatch:
    """One call that tells of each change.

    Args:
        role: of the service, for sentences.
        address: of the server, for the log.
        service: full name, as health knows it.
        channel: that it is told over.
    """

    def __init__(self, role: str, address: str, service: str, channel: grpc.aio.Channel) -> None:
        self._role = role
        self._address = address
        request = health_pb2.HealthCheckRequest(service=service)
        self._call: Any = health_pb2_grpc.HealthStub(channel).Watch(request)

    async def first(self, seconds: float) -> bool | None:
        """Whether it serves now, for which it has so long.

        Raises:
            TandemError: it cannot be reached.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self.next()
        except TimeoutError as error:
            raise Unavailable(f"the {self._role} did not answer within {seconds:g} s") from error

    async def next(self) -> bool | None:
        """Whether it serves, when that has changed; None when it stops.

        Raises:
            TandemError: it cannot be reached any more.
        """
        try:
            news = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_peer(self._role, self._address, error.code(), error.details()) from error
        except asyncio.CancelledError:
            # The library says it so too where the peer, or the connection, has cancelled the call.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise Unavailable(f"the {self._role} has stopped") from None
        if news is grpc.aio.EOF:
            return None
        return bool(news.status == health_pb2.HealthCheckResponse.SERVING)

    def end(self) -> None:
        """Be told no more."""
        self._call.cancel()
