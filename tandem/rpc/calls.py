"""Client side of a stream that is one sequence: what is asked, and that the answer fits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.errors import PeerFailure, TandemError, Unavailable
from tandem.rpc import messages
from tandem.rpc.status import from_peer
from tandem.speculation.sampling import Sampling
from tandem.target.v1 import target_pb2
from tandem.telemetry.stages import StageTimes

# How long a peer may take to say goodbye, before the stream is cancelled.
CLOSE_SECONDS = 1.0


class Reply(Protocol):
    """A response with a `result` oneof."""

    def WhichOneof(self, oneof_group: Any, /) -> Any:
        """The branch that is set."""


Q = TypeVar("Q")
R = TypeVar("R", bound=Reply)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What opens a sequence on either service.

    Attributes:
        request_id: for logs and traces.
        token_ids: of the prompt and of all that was emitted before.
        sampling: with the seed.
        first_round: number of the target's first round.
        max_new_tokens: that may still be emitted.
        target_vocab_size: bounds every id, drafted or emitted.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: Sampling
    first_round: int
    max_new_tokens: int
    target_vocab_size: int


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
    """One sequence's stream: a question, an answer, and so on, until close or cancel.

    A peer may be of another release, or broken. Its answers are compared with what was asked
    before anything is emitted, since nothing emitted can be taken back.
    """

    def __init__(
        self, role: str, address: str, call: grpc.aio.StreamStreamCall[Q, R], close: Q
    ) -> None:
        self._role = role
        self._address = address
        self._call = call
        self._close_message = close
        self._vocab_size = 0

    async def _ask(self, request: Q, kind: str, seconds: float) -> R:
        """Send a request and wait for its answer.

        Raises:
            Unavailable: no answer in time.
            TandemError: what the peer ended the stream with means, or the answer is of another
                kind.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._call.write(request)
                reply = await self._call.read()
        except TimeoutError:
            self._call.cancel()
            error = Unavailable(f"the {self._role} did not answer within {seconds:g} s; try again")
            error.add_note(f"{self._role} {self._address}")
            raise error from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as failure:
            raise await self._ended() from failure
        if reply is grpc.aio.EOF:
            raise await self._ended()
        answer: R = reply  # type: ignore[assignment]
        if (got := answer.WhichOneof("result")) != kind:
            raise self._broken(f"result must be {kind}, got {got}")
        return answer

    async def _ended(self) -> TandemError:
        code, details = await self._call.code(), await self._call.details()
        return from_peer(self._role, self._address, code, details)

    def _expect(self, field: str, value: int, least: int, most: int) -> None:
        """Refuse an answer that does not fit what was asked.

        Raises:
            PeerFailure: the value is out of its bounds.
        """
        if not least <= value <= most:
            bounds = str(least) if least == most else f"{least}..{most}"
            raise self._broken(f"{field} must be {bounds}, got {value}")

    def _expect_token(self, field: str, token_id: int) -> None:
        self._expect(field, token_id, 0, self._vocab_size - 1)

    def _broken(self, sentence: str) -> PeerFailure:
        error = PeerFailure(f"the {self._role} broke the contract: {sentence}")
        error.add_note(f"{self._role} {self._address}")
        return error

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

    async def open(self, prompt: Prompt, traceparent: str, seconds: float) -> StageTimes:
        """Prefill."""
        self._vocab_size = prompt.target_vocab_size
        request = drafter_pb2.OpenSequence(
            request_id=prompt.request_id,
            token_ids=prompt.token_ids,
            sampling=messages.sampling_to(prompt.sampling),
            target_vocab_size=prompt.target_vocab_size,
            first_round=prompt.first_round,
            max_new_tokens=prompt.max_new_tokens,
        )
        message = drafter_pb2.DraftRequest(traceparent=traceparent, open=request)
        reply = await self._ask(message, "opened", seconds)
        return messages.times_from(reply.opened.times)

    async def draft(
        self,
        round_: int,
        position: int,
        new_token_ids: Sequence[int],
        gamma: int,
        exact: bool,
        traceparent: str,
        seconds: float,
    ) -> Drafted:
        """Move the sequence on and draft behind it: gamma tokens, or fewer unless `exact`."""
        step = drafter_pb2.DraftStep(
            round=round_, position=position, new_token_ids=new_token_ids, gamma=gamma
        )
        message = drafter_pb2.DraftRequest(traceparent=traceparent, draft=step)
        drafted = (await self._ask(message, "drafted", seconds)).drafted
        end = position + len(new_token_ids)
        self._expect("drafted.round", drafted.round, round_, round_)
        self._expect("drafted.position", drafted.position, end, end)
        draft = drafted.draft
        self._check(draft, gamma if exact else 1, gamma)
        return Drafted(
            list(draft.token_ids),
            draft,
            len(draft.support_ids) + len(draft.weights),
            messages.times_from(drafted.times),
        )

    def _check(self, draft: common_pb2.Draft, least: int, gamma: int) -> None:
        """Refuse a draft of the wrong shape, while the text can still go on without it.

        Its rows stay unread: the target checks them.
        """
        count, entries = len(draft.token_ids), sum(draft.support_sizes)
        self._expect("len(draft.token_ids)", count, least, gamma)
        self._expect_token("max(draft.token_ids)", max(draft.token_ids))
        self._expect("len(draft.support_sizes)", len(draft.support_sizes), count, count)
        self._expect("len(draft.support_ids)", len(draft.support_ids), 4 * entries, 4 * entries)
        self._expect("len(draft.weights)", len(draft.weights), 2 * entries, 2 * entries)
        self._expect("len(draft.parents)", len(draft.parents), 0, 0)


class VerifyCall(_SequenceCall[target_pb2.VerifyRequest, target_pb2.VerifyResponse]):
    """A sequence on a target."""

    async def open(
        self, prompt: Prompt, verifier: str, gamma: int, traceparent: str, seconds: float
    ) -> Decided:
        """Prefill and draw the first token."""
        self._vocab_size = prompt.target_vocab_size
        request = target_pb2.OpenSequence(
            request_id=prompt.request_id,
            token_ids=prompt.token_ids,
            sampling=messages.sampling_to(prompt.sampling),
            verifier=verifier,
            first_round=prompt.first_round,
            gamma=gamma,
            max_new_tokens=prompt.max_new_tokens,
        )
        message = target_pb2.VerifyRequest(traceparent=traceparent, open=request)
        opened = (await self._ask(message, "opened", seconds)).opened
        if not opened.HasField("token_id"):
            raise self._broken("opened.token_id must be set")
        self._expect_token("opened.token_id", opened.token_id)
        return Decided(0, opened.token_id, [], messages.times_from(opened.times))

    async def verify(
        self, round_: int, position: int, draft: Drafted | None, traceparent: str, seconds: float
    ) -> Decided:
        """Have a draft decided; None decodes plainly."""
        step = target_pb2.VerifyStep(
            round=round_, position=position, draft=draft.payload if draft else None
        )
        message = target_pb2.VerifyRequest(traceparent=traceparent, verify=step)
        verdict = (await self._ask(message, "verdict", seconds)).verdict
        gamma = len(draft.token_ids) if draft else 0
        self._expect("verdict.round", verdict.round, round_, round_)
        self._expect("verdict.num_accepted", verdict.num_accepted, 0, gamma)
        end = position + verdict.num_accepted + 1
        self._expect("verdict.position", verdict.position, end, end)
        self._expect_token("verdict.next_token_id", verdict.next_token_id)
        self._expect("len(verdict.overlaps)", len(verdict.overlaps), gamma, gamma)
        return Decided(
            verdict.num_accepted,
            verdict.next_token_id,
            list(verdict.overlaps),
            messages.times_from(verdict.times),
        )
