"""Bytes to messages: what is no message, or too large a one, is the caller's fault and no crash.

gRPC would say UNKNOWN or INTERNAL, with the library's own words, and log a traceback.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from tandem.errors import InvalidRequest
from tandem.rpc.status import abort


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands where a message should be.

    Attributes:
        sentence: what is wrong with it.
    """

    sentence: str

    def error(self) -> InvalidRequest:
        """The error to end the call with."""
        return InvalidRequest(self.sentence)


class DecodingInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls whose request is no message with INVALID_ARGUMENT, on every method.

    Args:
        limits: bytes that a message of each method may have ("/package.Service/Method").
        otherwise: the same for all other methods.
    """

    def __init__(self, limits: Mapping[str, int], otherwise: int) -> None:
        self._limits = limits
        self._otherwise = otherwise

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """Wrap a method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name = handler_call_details.method
        limit = self._limits.get(name, self._otherwise)
        decode = _decoder(handler.request_deserializer, name, limit)
        if handler.request_streaming and handler.response_streaming:
            make, behaviour = grpc.stream_stream_rpc_method_handler, handler.stream_stream
            checked = _checking_stream(behaviour)
            return make(checked, decode, _unless_encoded(handler.response_serializer))
        elif handler.response_streaming:
            make, checked = grpc.unary_stream_rpc_method_handler, _checking(handler.unary_stream)
        else:
            make, checked = grpc.unary_unary_rpc_method_handler, _checking(handler.unary_unary)
        return make(checked, decode, handler.response_serializer)


def _decoder(deserialize: Any, name: str, limit: int) -> Callable[[bytes], Any]:
    kind = name.rpartition("/")[2]

    def decode(data: bytes) -> Any:
        if len(data) > limit:
            return Malformed(f"a message to {kind} has {len(data)} bytes, the limit is {limit}")
        try:
            return deserialize(data)
        except Exception:  # whatever the library raises for bytes that it cannot read
            return Malformed(f"the bytes sent to {kind} are no message of its kind")

    return decode


def _unless_encoded(serialize: Any) -> Callable[[Any], bytes]:
    """Let pass what is bytes already: an outbox joins messages that it has encoded."""
    return lambda message: message if isinstance(message, bytes) else serialize(message)


def _checking(behaviour: Any) -> Any:
    """Of a method with one request."""

    async def checked(request: Any, context: Any) -> Any:
        if isinstance(request, Malformed):
            await abort(context, request.error())
        return await behaviour(request, context)

    return checked


def _checking_stream(behaviour: Any) -> Any:
    """Of a method with many; a handler that reads by itself sees `Malformed`."""
    if not inspect.isasyncgenfunction(behaviour):
        return behaviour

    async def checked(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async def sound() -> AsyncIterator[Any]:
            async for request in requests:
                if isinstance(request, Malformed):
                    await abort(context, request.error())
                yield request

        async for reply in behaviour(sound(), context):
            yield reply

    return checked
