"""grpc.health.v1 for a service that drains."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.errors import Unavailable, cut
from tandem.rpc.status import from_peer

_Context = grpc.aio.ServicerContext[Any, Any]
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Who watches need not prove who he is. Orchestrators have one watch a replica, and kubelets none.
_MOST_WATCHES = 1024
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the library is untyped
    """The library's servicer, but that watches end when a drain begins.

    The library leaves them open, and each would hold the drain to its limit.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _SERVING}
        self._changed = asyncio.Condition()
        self._draining = False
        self._watches = 0

    async def set(self, service: str, status: int) -> None:
        """Say how a service is; ignored once a drain has begun."""
        async with self._changed:
            if not self._draining:
                self._statuses[service] = status
                self._changed.notify_all()

    async def drain(self) -> None:
        """Say NOT_SERVING of everything, for good, and end all watches."""
        async with self._changed:
            self._draining = True
            self._statuses = dict.fromkeys(self._statuses, _NOT_SERVING)
            self._changed.notify_all()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """See health.proto."""
        status = self._statuses.get(request.service)
        if status is None:
            sentence = cut(f"no service {request.service!r} here")
            await context.abort(grpc.StatusCode.NOT_FOUND, sentence)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # writes to the context, as grpc.aio allows
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> None:
        """See health.proto; RESOURCE_EXHAUSTED where as many watch as may."""
        if self._watches >= _MOST_WATCHES:
            sentence = f"{self._watches} watch already; ask by Check"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)
        self._watches += 1
        try:
            await self._tell(request.service, context)
        finally:
            self._watches -= 1

    async def _tell(self, service: str, context: _Context) -> None:
        """Say how a service is, now and whenever that changes."""
        shown: int | None = None
        while True:
            status = self._statuses.get(service, _UNKNOWN)
            if status != shown:
                await context.write(health_pb2.HealthCheckResponse(status=status))
            if self._draining:
                return
            shown = status
            async with self._changed:
                if not self._draining and self._statuses.get(service, _UNKNOWN) == shown:
                    await self._changed.wait()


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
            reply = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_peer(self._role, self._address, error.code(), error.details()) from error
        except asyncio.CancelledError:
            # The library says it so too where the peer, or the connection, has cancelled the call.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise Unavailable(f"the {self._role} has stopped") from None
        if reply is grpc.aio.EOF:
            return None
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def end(self) -> None:
        """Be told no more."""
        self._call.cancel()
