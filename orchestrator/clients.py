"""Client side of the drafter and the target: one object a peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from orchestrator.calls import (
    DRAFT_METHOD,
    VERIFY_METHOD,
    CountingOn,
    DraftCall,
    VerifyCall,
)
from orchestrator.deadlines import Waits
from orchestrator.spans import TextSpans
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.errors import Exhausted, Unavailable
from tandem.rpc.call import SequenceCall
from tandem.rpc.channel import connect
from tandem.rpc.link import Link
from tandem.rpc.status import from_peer
from tandem.target.v1 import target_pb2, target_pb2_grpc

_PROBE = "probe"
_PROBE_SAMPLING = common_pb2.Sampling(temperature=0.0, seed=0)

_DraftSequence = SequenceCall[drafter_pb2.SequenceRequest, drafter_pb2.SequenceResponse]
_VerifySequence = SequenceCall[target_pb2.SequenceRequest, target_pb2.SequenceResponse]


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
        call = self._sequence(seconds, max_bytes)
        return DraftCall(call, waits, spans, target_max_bytes, counting_on)

    def _sequence(self, seconds: float | None, max_bytes: int) -> _DraftSequence:
        close = drafter_pb2.SequenceRequest(close=drafter_pb2.CloseSequence())
        return SequenceCall(self._link, drafter_pb2.DraftRequest, close, seconds, max_bytes)

    async def probe(self, reply: drafter_pb2.GetModelInfoResponse, seconds: float) -> None:
        """Have it draft one token of a sequence that is nobody's; each answer may take a time.

        Raises:
            TandemError: it cannot.
        """
        call = self._sequence(None, reply.info.max_message_bytes)
        opening = drafter_pb2.OpenSequence(
            request_id=_PROBE,
            token_ids=[0],
            sampling=_PROBE_SAMPLING,
            target_vocab_size=reply.info.vocab_size or 1,
            max_new_tokens=2,
        )
        step = drafter_pb2.DraftStep(round=1, position=1, new_token_ids=[0], gamma=1)
        with _answered(call):
            await call.open(drafter_pb2.SequenceRequest(open=opening), "opened", seconds)
            await call.ask(drafter_pb2.SequenceRequest(draft=step), "drafted", seconds)


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
        return VerifyCall(self._sequence(seconds, max_bytes), waits, spans, counting_on)

    def _sequence(self, seconds: float | None, max_bytes: int) -> _VerifySequence:
        close = target_pb2.SequenceRequest(close=target_pb2.CloseSequence())
        return SequenceCall(self._link, target_pb2.VerifyRequest, close, seconds, max_bytes)

    async def probe(self, reply: target_pb2.GetModelInfoResponse, seconds: float) -> None:
        """Have it make two tokens of a sequence that is nobody's; each answer may take a time.

        Raises:
            TandemError: it cannot.
        """
        rule = next((info.name for info in reply.verifiers if not info.fixed_gamma), None)
        if rule is None:  # one that would need a draft: its health has to do
            return
        call = self._sequence(None, reply.info.max_message_bytes)
        opening = target_pb2.OpenSequence(
            request_id=_PROBE,
            token_ids=[0],
            sampling=_PROBE_SAMPLING,
            verifier=rule,
            max_new_tokens=2,
        )
        step = target_pb2.VerifyStep(round=1, position=2)
        with _answered(call):
            await call.open(target_pb2.SequenceRequest(open=opening), "opened", seconds)
            await call.ask(target_pb2.SequenceRequest(verify=step), "verdict", seconds)


@contextmanager
def _answered(call: _DraftSequence | _VerifySequence) -> Iterator[None]:
    """A probe, which is over with the block. That all places are taken is an answer too."""
    try:
        yield
    except Exhausted:
        pass
    finally:
        call.cancel()
