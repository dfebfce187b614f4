"""A connection to one orchestrator, without asyncio."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.client.errors import Lost, failure_of, unconnected
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.endpoint import Endpoint, endpoint_at

# How long a host may take to accept a connection, and to answer GetModelInfo.
CONNECT_SECONDS = 5.0
INFO_SECONDS = 10.0

_Metadata = Sequence[tuple[str, str]]


class Connection:
    """A connection to an orchestrator; use it as a context manager.

    Args:
        where: the orchestrator's endpoint or address.
    """

    def __init__(self, where: Endpoint | str) -> None:
        endpoint = endpoint_at(where)
        self._address = endpoint.address
        self._metadata = endpoint.metadata
        self._channel = endpoint.connect_blocking()
        self._stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    def __enter__(self) -> Self:
        """See `open`."""
        self.open(CONNECT_SECONDS)
        return self

    def open(self, seconds: float) -> None:
        """Connect, within some seconds.

        Raises:
            Lost: no orchestrator answers at the address.
            TimedOut: that was too short to know.
        """
        try:
            self._connect(seconds)
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End its calls."""
        self._channel.close()

    def _connect(self, seconds: float) -> None:
        """Tell "nothing listens there" from UNAVAILABLE, which an orchestrator may answer too."""
        check = health_pb2_grpc.HealthStub(self._channel).Check
        try:
            check(health_pb2.HealthCheckRequest(), timeout=seconds)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise unconnected(self._address, in_time=seconds >= CONNECT_SECONDS) from None
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise unconnected(self._address, in_time=True) from None
            # A server that answers anything else listens.

    def info(self) -> pb.GetModelInfoResponse:
        """What is served.

        Raises:
            CallFailed: the orchestrator is not ready.
        """
        with _readable():
            reply: pb.GetModelInfoResponse = self._stub.GetModelInfo(
                pb.GetModelInfoRequest(), timeout=INFO_SECONDS, metadata=self._metadata
            )
        return reply

    def complete(
        self, generation: pb.Generation, timeout_s: float | None = None
    ) -> pb.CompleteResponse:
        """A whole text.

        Raises:
            CallFailed: the call's status; Lost if another call may succeed.
        """
        with _readable():
            reply: pb.CompleteResponse = self._stub.Complete(
                pb.CompleteRequest(generation=generation),
                timeout=timeout_s,
                metadata=self._metadata,
            )
        return reply

    def generate(
        self,
        generation: pb.Generation,
        timeout_s: float | None = None,
        metadata: _Metadata = (),
    ) -> Iterator[pb.GenerateResponse]:
        """A text, round by round, then its summary. Closing the iterator early cancels the call.

        Raises:
            CallFailed: the call's status; Lost if another call may succeed.
        """
        request = pb.GenerateRequest(generation=generation)
        with _readable():
            call = self._stub.Generate(
                request, timeout=timeout_s, metadata=(*self._metadata, *metadata)
            )
        try:
            with _readable():
                yield from call
        finally:
            call.cancel()


def sampled(wanted: bool) -> tuple[tuple[str, str], ...]:
    """Metadata that makes the services record a call's spans, or not."""
    return (
        ("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{int(wanted):02x}"),
    )


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise failure_of(error) from error
    except ValueError as error:  # what gRPC says of a call on a channel that was closed
        raise Lost(f"CANCELLED: {error}", "CANCELLED") from error
