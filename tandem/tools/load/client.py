"""An orchestrator, called without asyncio: one text at a time."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc

from tandem.failure import Failure
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.endpoint import Endpoint, endpoint_at

# How long a host may take to accept a connection, and to answer GetModelInfo.
CONNECT_SECONDS = 5.0
INFO_SECONDS = 10.0

# After these statuses the same call may succeed, here a moment later or at another orchestrator.
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,  # a connection that broke, in gRPC's words
)

_Metadata = Sequence[tuple[str, str]]


class Lost(Failure):
    """No orchestrator answers, or it was lost; a call may succeed a moment later, or elsewhere."""


class Client:
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
        """Connect.

        Raises:
            Lost: no orchestrator answers at the address.
        """
        try:
            self._connect()
        except BaseException:
            self._channel.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()

    def _connect(self) -> None:
        """Tell "nothing listens there" from UNAVAILABLE, which an orchestrator may answer too."""
        states: queue.Queue[grpc.ChannelConnectivity] = queue.Queue()
        self._channel.subscribe(states.put, try_to_connect=True)
        settled = (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE)
        state = None
        try:
            while state not in settled:
                state = states.get(timeout=CONNECT_SECONDS)
        except queue.Empty:
            pass
        finally:
            self._channel.unsubscribe(states.put)
        if state is not grpc.ChannelConnectivity.READY:
            raise Lost(
                f"no orchestrator answers at {self._address}: start one with `tandem up`,"
                " or name another with --address"
            )

    def info(self) -> pb.GetModelInfoResponse:
        """What is served.

        Raises:
            Failure: the orchestrator is not ready.
        """
        with self._readable():
            reply: pb.GetModelInfoResponse = self._stub.GetModelInfo(
                pb.GetModelInfoRequest(), timeout=INFO_SECONDS, metadata=self._metadata
            )
        return reply

    def complete(
        self, generation: pb.Generation, timeout_s: float | None = None
    ) -> pb.CompleteResponse:
        """A whole text.

        Raises:
            Failure: the call's status, in one sentence; Lost if another call may succeed.
        """
        with self._readable():
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
            Failure: the call's status, in one sentence; Lost if another call may succeed.
        """
        request = pb.GenerateRequest(generation=generation)
        call = self._stub.Generate(
            request, timeout=timeout_s, metadata=(*self._metadata, *metadata)
        )
        try:
            with self._readable():
                yield from call
        finally:
            call.cancel()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
            details = error.details() if isinstance(error, grpc.Call) else str(error)
            kind = Lost if code in _PASSING else Failure
            raise kind(sentence(code, details)) from error


def sentence(code: grpc.StatusCode, details: str | None) -> str:
    """A status as one line, even if the details have several."""
    return f"{code.name}: {' '.join((details or 'no details given').split())}"


def sampled(wanted: bool) -> tuple[tuple[str, str], ...]:
    """Metadata that makes the services record a call's spans, or not."""
    return (
        ("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{int(wanted):02x}"),
    )
