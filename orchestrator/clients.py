"""Client side of the drafter and the target: one object a peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.calls import (
    DRAFT_METHOD,
    VERIFY_METHOD,
    CountingOn,
    DraftCall,
    VerifyCall,
    Waits,
)
from orchestrator.spans import TextSpans
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.errors import Unavailable
from tandem.rpc.call import SequenceCall
from tandem.rpc.channel import connect
from tandem.rpc.link import Link
from tandem.rpc.status import from_peer
from tandem.target.v1 import target_pb2, target_pb2_grpc


class _Peer:
    """A channel to one address.

    Attributes:
        role: what it is to be, for sentences.
        address: see there.
    """

    role: str
    _service: str
    _link: Link[Any]

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = connect(address)

    async def health(self, seconds: float) -> AsyncGenerator[bool, None]:
        """Whether it serves, now and whenever that changes, until it stops.

        Args:
            seconds: that the first answer may take.

        Raises:
            TandemError: it cannot be reached, or no more.
        """
        request = health_pb2.HealthCheckRequest(service=self._service)
        call: Any = health_pb2_grpc.HealthStub(self._channel).Watch(request)
        wait: float | None = seconds
        try:
            while True:
                async with asyncio.timeout(wait):
                    news = await call.read()
                if news is grpc.aio.EOF:
                    return
                wait = None
                yield news.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError as error:
            raise from_peer(self.role, self.address, error.code(), error.details()) from error
        except TimeoutError as error:
            raise Unavailable(f"the {self.role} did not answer within {seconds:g} s") from error
        except asyncio.CancelledError:
            # The library says it so too where the peer, or the connection, has cancelled the call.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise Unavailable(f"the {self.role} has stopped") from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """End the streams, and close the channel."""
        await self._link.close()
        await self._channel.close()

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_peer(self.role, self.address, error.code(), error.details()) from error


class DrafterClient(_Peer):
    """A drafter at an address."""

    role = "drafter"
    _service = "tandem.drafter.v1.DrafterService"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._stub: Any = drafter_pb2_grpc.DrafterServiceStub(self._channel)
        self._link = Link(
            self.role,
            address,
            self._channel.stream_stream(
                f"/{DRAFT_METHOD}",
                response_deserializer=drafter_pb2.DraftResponse.FromString,
            ),
        )

    async def model_info(self, seconds: float) -> drafter_pb2.GetModelInfoResponse:
        """What it serves."""
        request = drafter_pb2.GetModelInfoRequest()
        reply: drafter_pb2.GetModelInfoResponse = await self._call(
            self._stub.GetModelInfo(request, timeout=seconds)
        )
        return reply

    def sequence(
        self,
        seconds: float | None,
        waits: Waits,
        spans: TextSpans,
        max_bytes: int,
        target_max_bytes: int,
        counting_on: CountingOn,
    ) -> DraftCall:
        """A fresh sequence, for at most `seconds`; of messages that it, and a target, takes."""
        close = drafter_pb2.SequenceRequest(close=drafter_pb2.CloseSequence())
        call = SequenceCall(self._link, drafter_pb2.DraftRequest, close, seconds, max_bytes)
        return DraftCall(call, waits, spans, target_max_bytes, counting_on)


class TargetClient(_Peer):
    """A target at an address."""

    role = "target"
    _service = "tandem.target.v1.TargetService"

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._stub: Any = target_pb2_grpc.TargetServiceStub(self._channel)
        self._link = Link(
            self.role,
            address,
            self._channel.stream_stream(
                f"/{VERIFY_METHOD}",
                response_deserializer=target_pb2.VerifyResponse.FromString,
            ),
        )

    async def model_info(self, seconds: float) -> target_pb2.GetModelInfoResponse:
        """What it serves."""
        request = target_pb2.GetModelInfoRequest()
        reply: target_pb2.GetModelInfoResponse = await self._call(
            self._stub.GetModelInfo(request, timeout=seconds)
        )
        return reply

    async def tokenizer_json(self, seconds: float) -> bytes:
        """Its serialised tokenizer; empty where it has none."""
        call = self._stub.GetTokenizer(target_pb2.GetTokenizerRequest(), timeout=seconds)
        if await call.code() == grpc.StatusCode.NOT_FOUND:
            return b""
        reply: target_pb2.GetTokenizerResponse = await self._call(call)
        return reply.tokenizer_json

    def sequence(
        self,
        seconds: float | None,
        waits: Waits,
        spans: TextSpans,
        max_bytes: int,
        counting_on: CountingOn,
    ) -> VerifyCall:
        """A fresh sequence, for at most `seconds`; of messages that it takes."""
        close = target_pb2.SequenceRequest(close=target_pb2.CloseSequence())
        call = SequenceCall(self._link, target_pb2.VerifyRequest, close, seconds, max_bytes)
        return VerifyCall(call, waits, spans, counting_on)
