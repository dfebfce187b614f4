"""Authenticates and authorises callers, before a call reaches its handler."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from tandem.errors import Forbidden, TandemError
from tandem.rpc.security.tokens import BearerTokens
from tandem.rpc.status import abort
from tandem.telemetry.logs import bind_caller

# Health probes have neither a token nor a certificate.
_OPEN_TO_ALL = "/grpc.health.v1.Health/"


@dataclass(frozen=True)
class Caller:
    """The authenticated caller of a call.

    Attributes:
        name: of the token's owner, or from the client's certificate; empty if that has none.
        proof: how the caller was authenticated.
    """

    name: str
    proof: Literal["token", "certificate"]


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def caller() -> Caller | None:
    """The caller of the call that is being handled; None without authentication."""
    return _caller.get()


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Admits calls of authorised callers, and all health checks.

    Args:
        tokens: a call must bring one of these; None asks for no token: TLS has then already
            required a certificate.
        clients: names in certificates that may call; if empty, any valid certificate may.
    """

    def __init__(self, tokens: BearerTokens | None, clients: Sequence[str]) -> None:
        self._tokens = tokens
        self._clients = frozenset(clients)

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """Wrap a method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_TO_ALL):
            return handler
        coders = handler.request_deserializer, handler.response_serializer
        if handler.request_streaming and handler.response_streaming:
            behaviour = handler.stream_stream
            return grpc.stream_stream_rpc_method_handler(self._guarded(behaviour), *coders)
        if handler.response_streaming:
            behaviour = handler.unary_stream
            return grpc.unary_stream_rpc_method_handler(self._guarded(behaviour), *coders)
        return grpc.unary_unary_rpc_method_handler(self._guarded(handler.unary_unary), *coders)

    def _guarded(self, behaviour: Any) -> Any:
        """A handler that first checks the caller; of the same kind, since gRPC inspects it."""
        if inspect.isasyncgenfunction(behaviour):

            async def streaming(request: Any, context: Any) -> AsyncIterator[Any]:
                await self._admit(context)
                async for reply in behaviour(request, context):
                    yield reply

            return streaming

        async def guarded(request: Any, context: Any) -> Any:
            await self._admit(context)
            return await behaviour(request, context)

        return guarded

    async def _admit(self, context: Any) -> None:
        """Record the caller, or abort the call."""
        try:
            known = self._known(context)
        except TandemError as error:
            await abort(context, error)
        _caller.set(known)
        bind_caller(known.name)

    def _known(self, context: Any) -> Caller:
        """The caller.

        Raises:
            Forbidden: no name in the certificate may call.
            Unauthenticated: there is no valid token.
        """
        names = [name.decode(errors="replace") for name in context.peer_identities() or ()]
        if self._clients:
            names = [name for name in names if name in self._clients]
            if not names:
                raise Forbidden("the client's certificate has no name that may call here")
        if self._tokens is not None:
            metadata = context.invocation_metadata() or ()
            presented = [str(value) for key, value in metadata if key == "authorization"]
            return Caller(self._tokens.owner_of(presented), "token")
        return Caller(names[0] if names else "", "certificate")
