"""Server reflection that finds methods too.

ghz asks for "package.Service.Method"; protobuf's upb descriptor pool knows services and
fields by name, but not methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection


class _MethodPool:
    """The default descriptor pool, with methods among its symbols."""

    def __getattr__(self, name: str) -> Any:
        return getattr(descriptor_pool.Default(), name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # the pool's own name
        pool = descriptor_pool.Default()
        try:
            return pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            return pool.FindServiceByName(service).methods_by_name[method].containing_service.file


def enable(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Let clients ask what a server offers.

    Args:
        names: full names of its services; reflection's own is added.
        server: not started yet.
    """
    names = (*names, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, pool=_MethodPool())
