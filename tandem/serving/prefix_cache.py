"""PrefixCacheService: what an administrator does to the prefixes of a drafter or a target."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import structlog

from tandem.common.v1 import prefix_cache_pb2, prefix_cache_pb2_grpc
from tandem.rpc.server import GrpcService
from tandem.rpc.status import status_boundary

_log = structlog.get_logger(__name__)


class PrefixCacheServicer(prefix_cache_pb2_grpc.PrefixCacheServiceServicer):
    """Empties the cache of prefixes.

    Args:
        forget: empties it; says how many positions only prefixes held.
    """

    def __init__(self, forget: Callable[[], int]) -> None:
        self._forget = forget

    async def ForgetPrefixes(
        self,
        request: prefix_cache_pb2.ForgetPrefixesRequest,
        context: grpc.aio.ServicerContext[
            prefix_cache_pb2.ForgetPrefixesRequest, prefix_cache_pb2.ForgetPrefixesResponse
        ],
    ) -> prefix_cache_pb2.ForgetPrefixesResponse:
        """See prefix_cache.proto."""
        async with status_boundary(context):
            positions = await asyncio.to_thread(self._forget)
            _log.info("prefixes forgotten", positions=positions)
            return prefix_cache_pb2.ForgetPrefixesResponse(positions=positions)


def prefix_cache_service(forget: Callable[[], int]) -> GrpcService:
    """The service as the admin port answers it; see `PrefixCacheServicer`."""
    servicer = PrefixCacheServicer(forget)
    return GrpcService(
        "tandem.common.v1.PrefixCacheService",
        lambda server: prefix_cache_pb2_grpc.add_PrefixCacheServiceServicer_to_server(
            servicer, server
        ),
        (),
    )
