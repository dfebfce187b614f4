"""Who calls, and whether they may: asked before a handler hears of the call."""

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

# Probes have neither a token nor a name.
_OPEN_TO_ALL = "/grpc.health.v1.Health/"


@dataclass(frozen=True)
class Caller:
    """Who has proved to be behind a call.

    Attributes:
        name: of a token's owner, or in a client's certificate; empty where that has none.
        proof: what it was proved by.
    """

    name: str
    proof: Literal["token", "certificate"]


_caller: ContextVar[Caller | None] = ContextVar("caller", default=None)


def caller() -> Caller | None:
    """Who is behind the call that is being handled; None where nobody had to prove anything."""
    return _caller.get()


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls pass whose caller may make them, but for health checks, which all may make.

    Args:
        tokens: one of which a call has to bring; None asks for none, and then all have shown a
            certificate.
        clients: names of certificates that may call; none at all lets in whoever has one.
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
        """A handler that is reached by who may reach it; it stays what it was, as gRPC looks."""
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
        """Note who calls, or end the call."""
        try:
            known = self._known(context)
        except TandemError as error:
            await abort(context, error)
        _caller.set(known)
        bind_caller(known.name)

    def _known(self, context: Any) -> Caller:
        """Who calls.

        Raises:
            Forbidden: the certificate's names are none that may.
            Unauthenticated: there is no good token.
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
