"""Client side of the drafter and the target: one object a peer, one a sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.errors import NotFound, TandemError, Unavailable
from tandem.rpc import messages
from tandem.rpc.channel import connect
from tandem.rpc.status import from_rpc
from tandem.speculation.sampling import Sampling
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.telemetry.stages import StageTimes

# How long a peer may take to say goodbye, before the stream is cancelled.
CLOSE_SECONDS = 1.0

Q = TypeVar("Q")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What opens a sequence on either service.

    Attributes:
        request_id: for logs and traces.
        token_ids: of the prompt and of all that was emitted before.
        sampling: with the seed.
        first_round: number of the target's first round.
        max_new_tokens: that may still be emitted.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: Sampling
    first_round: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """A drafter's answer.

    Attributes:
        token_ids: drafted.
        payload: the draft with its distributions, for the target, unread.
        payload_bytes: size of the distributions.
        times: the drafter's.
    """

    token_ids: list[int]
    payload: common_pb2.Draft
    payload_bytes: int
    times: StageTimes


@dataclass(frozen=True, slots=True)
class Decided:
    """A target's answer.

    Attributes:
        num_accepted: drafted tokens kept.
        next_token: correction or bonus.
        overlaps: Σ min(p, q) of each drafted position.
        times: the target's.
    """

    num_accepted: int
    next_token: int
    overlaps: list[float]
    times: StageTimes


class _SequenceCall(Generic[Q, R]):
    """One sequence's stream: a question, an answer, and so on, until close or cancel."""

    def __init__(self, peer: str, call: grpc.aio.StreamStreamCall[Q, R], close: Q) -> None:
        self._peer = peer
        self._call = call
        self._close_message = close

    async def _ask(self, request: Q, seconds: float) -> R:
        """Send a request and wait for its answer.

        Raises:
            Unavailable: no answer in time, or the stream is over.
            TandemError: the status that the peer ended the stream with.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._call.write(request)
                reply = await self._call.read()
        except TimeoutError:
            self._call.cancel()
            raise Unavailable(f"{self._peer} did not answer within {seconds:g} s") from None
        except grpc.RpcError as error:
            raise from_rpc(self._peer, error) from error
        except asyncio.InvalidStateError:
            raise await self._ended() from None
        if reply is grpc.aio.EOF:
            raise await self._ended()
        return reply  # type: ignore[return-value]

    async def _ended(self) -> TandemError:
        code, details = await self._call.code(), await self._call.details()
        return Unavailable(f"{self._peer} ended the stream: {details or code}")

    async def close(self) -> None:
        """Say goodbye and wait for the end; a peer that is gone already is fine."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._call.write(self._close_message)
                await self._call.done_writing()
                await self._call.read()
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
            self.cancel()

    def cancel(self) -> None:
        """Abandon the sequence; the peer frees it. Harmless after the end."""
        self._call.cancel()


class DraftCall(_SequenceCall[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse]):
    """A sequence on a drafter."""

    async def open(
        self, prompt: Prompt, target_vocab_size: int, traceparent: str, seconds: float
    ) -> StageTimes:
        """Prefill."""
        request = drafter_pb2.OpenSequence(
            request_id=prompt.request_id,
            token_ids=prompt.token_ids,
            sampling=messages.sampling_to(prompt.sampling),
            target_vocab_size=target_vocab_size,
            first_round=prompt.first_round,
            max_new_tokens=prompt.max_new_tokens,
        )
        reply = await self._ask(
            drafter_pb2.DraftRequest(traceparent=traceparent, open=request), seconds
        )
        return messages.times_from(reply.opened.times)

    async def draft(
        self,
        round_: int,
        position: int,
        new_token_ids: Sequence[int],
        gamma: int,
        traceparent: str,
        seconds: float,
    ) -> Drafted:
        """Move the sequence on and draft behind it."""
        step = drafter_pb2.DraftStep(
            round=round_, position=position, new_token_ids=new_token_ids, gamma=gamma
        )
        reply = await self._ask(
            drafter_pb2.DraftRequest(traceparent=traceparent, draft=step), seconds
        )
        draft = reply.drafted.draft
        return Drafted(
            list(draft.token_ids),
            draft,
            len(draft.support_ids) + len(draft.weights),
            messages.times_from(reply.drafted.times),
        )


class VerifyCall(_SequenceCall[target_pb2.VerifyRequest, target_pb2.VerifyResponse]):
    """A sequence on a target."""

    async def open(
        self, prompt: Prompt, verifier: str, gamma: int, traceparent: str, seconds: float
    ) -> Decided:
        """Prefill and draw the first token."""
        request = target_pb2.OpenSequence(
            request_id=prompt.request_id,
            token_ids=prompt.token_ids,
            sampling=messages.sampling_to(prompt.sampling),
            verifier=verifier,
            first_round=prompt.first_round,
            gamma=gamma,
            max_new_tokens=prompt.max_new_tokens,
        )
        reply = await self._ask(
            target_pb2.VerifyRequest(traceparent=traceparent, open=request), seconds
        )
        opened = reply.opened
        return Decided(0, opened.token_id, [], messages.times_from(opened.times))

    async def verify(
        self, round_: int, position: int, draft: Drafted | None, traceparent: str, seconds: float
    ) -> Decided:
        """Have a draft decided; None decodes plainly."""
        step = target_pb2.VerifyStep(
            round=round_, position=position, draft=draft.payload if draft else None
        )
        reply = await self._ask(
            target_pb2.VerifyRequest(traceparent=traceparent, verify=step), seconds
        )
        verdict = reply.verdict
        return Decided(
            verdict.num_accepted,
            verdict.next_token_id,
            list(verdict.overlaps),
            messages.times_from(verdict.times),
        )


class _Peer:
    """A channel to one address."""

    def __init__(self, role: str, address: str) -> None:
        self.address = address
        self._name = f"{role} {address}"
        self._channel = connect(address)

    async def close(self) -> None:
        """Close the channel; its calls end."""
        await self._channel.close()

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except grpc.RpcError as error:
            raise from_rpc(self._name, error) from error


class DrafterClient(_Peer):
    """A drafter at an address."""

    def __init__(self, address: str) -> None:
        super().__init__("drafter", address)
        self._stub: Any = drafter_pb2_grpc.DrafterServiceStub(self._channel)

    async def model_info(self, seconds: float) -> drafter_pb2.GetModelInfoResponse:
        """What it serves."""
        request = drafter_pb2.GetModelInfoRequest()
        reply: drafter_pb2.GetModelInfoResponse = await self._call(
            self._stub.GetModelInfo(request, timeout=seconds)
        )
        return reply

    def sequence(self, seconds: float | None) -> DraftCall:
        """A new stream, at most as long as the request's deadline."""
        close = drafter_pb2.DraftRequest(close=drafter_pb2.CloseSequence())
        return DraftCall(self._name, self._stub.Draft(timeout=seconds), close)


class TargetClient(_Peer):
    """A target at an address."""

    def __init__(self, address: str) -> None:
        super().__init__("target", address)
        self._stub: Any = target_pb2_grpc.TargetServiceStub(self._channel)

    async def model_info(self, seconds: float) -> target_pb2.GetModelInfoResponse:
        """What it serves."""
        request = target_pb2.GetModelInfoRequest()
        reply: target_pb2.GetModelInfoResponse = await self._call(
            self._stub.GetModelInfo(request, timeout=seconds)
        )
        return reply

    async def tokenizer_json(self, seconds: float) -> bytes:
        """Its serialised tokenizer; empty where it has none."""
        try:
            request = target_pb2.GetTokenizerRequest()
            reply: target_pb2.GetTokenizerResponse = await self._call(
                self._stub.GetTokenizer(request, timeout=seconds)
            )
        except NotFound:
            return b""
        return reply.tokenizer_json

    def sequence(self, seconds: float | None) -> VerifyCall:
        """A new stream, at most as long as the request's deadline."""
        close = target_pb2.VerifyRequest(close=target_pb2.CloseSequence())
        return VerifyCall(self._name, self._stub.Verify(timeout=seconds), close)
