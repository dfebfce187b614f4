"""TargetService: one stream is one sequence."""

from __future__ import annotations

import math
from functools import partial

import grpc
import structlog

from tandem.common.v1 import common_pb2
from tandem.errors import InvalidRequest, NotFound, WrongState
from tandem.inference.admission import AdmissionLimits
from tandem.inference.decoder import Decoder
from tandem.inference.engine import BatchLimits
from tandem.inference.model_servicer import ModelServicer
from tandem.rpc import messages
from tandem.rpc.model_info import engine_stats, model_info
from tandem.rpc.sequence import Progress, SequenceStream, StepReply
from tandem.rpc.server import Service
from tandem.rpc.status import status_boundary
from tandem.target.v1 import target_pb2, target_pb2_grpc
from target_svc.engine import TargetEngine, TargetSequence
from target_svc.settings import TargetSettings
from target_svc.verifiers import VERIFIERS
from target_svc.verifiers.greedy_block import GreedyBlockCarry, GreedyBlockVerifier

_Context = grpc.aio.ServicerContext[target_pb2.VerifyRequest, target_pb2.VerifyResponse]


class TargetServicer(
    ModelServicer[TargetSettings, TargetEngine], target_pb2_grpc.TargetServiceServicer
):
    """Serves a target engine, once its model is loaded."""

    def __init__(self, settings: TargetSettings) -> None:
        super().__init__(settings, "target")

    def _make_engine(
        self, decoder: Decoder, admission: AdmissionLimits, batch: BatchLimits
    ) -> TargetEngine:
        return TargetEngine(decoder, admission, batch)

    async def Verify(self, request_iterator: object, context: _Context) -> None:  # type: ignore[override]
        """See target.proto."""
        async with status_boundary(context):
            await _VerifyStream(self, context).run()

    async def GetModelInfo(
        self,
        request: target_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[
            target_pb2.GetModelInfoRequest, target_pb2.GetModelInfoResponse
        ],
    ) -> target_pb2.GetModelInfoResponse:
        """See target.proto."""
        async with status_boundary(context):
            return target_pb2.GetModelInfoResponse(
                info=model_info(self.engine, self.max_length, self.settings.max_gamma),
                stats=engine_stats(self.engine),
                verifiers=sorted(VERIFIERS),
            )

    async def GetTokenizer(
        self,
        request: target_pb2.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[
            target_pb2.GetTokenizerRequest, target_pb2.GetTokenizerResponse
        ],
    ) -> target_pb2.GetTokenizerResponse:
        """See target.proto."""
        async with status_boundary(context):
            decoder = self.engine.decoder
            tokenizer_json = decoder.tokenizer_json()
            if not tokenizer_json:
                raise NotFound("the checkpoint has no tokenizer; send prompts as token ids")
            return target_pb2.GetTokenizerResponse(
                tokenizer_json=tokenizer_json,
                fingerprint=decoder.tokenizer_fingerprint,
                chat_template=decoder.chat_template(),
            )


class _VerifyStream(SequenceStream[target_pb2.VerifyRequest, target_pb2.VerifyResponse]):
    """One sequence's stream."""

    def __init__(self, servicer: TargetServicer, context: _Context) -> None:
        super().__init__(context, "verify", servicer.settings.idle_seconds)
        self._servicer = servicer
        self._engine = servicer.engine
        self._sequence: TargetSequence | None = None
        self._progress: Progress
        self._gamma = 0
        self._end = 0

    async def open(self, message: target_pb2.VerifyRequest) -> StepReply[target_pb2.VerifyResponse]:
        request = message.open
        messages.check_request_id(request.request_id)
        structlog.contextvars.bind_contextvars(request_id=request.request_id)
        token_ids = list(request.token_ids)
        self._check_open(request, token_ids)
        sequence = self._sequence = TargetSequence(
            token_ids,
            messages.sampling_from(request.sampling),
            VERIFIERS[request.verifier],
            _carry_from(request),
        )
        self._gamma = request.gamma
        self._end = len(token_ids) + request.max_new_tokens
        job = await self._engine.open(sequence, request.first_round, capacity=self._end)
        self._progress = Progress(sequence.length, request.first_round)
        opened = target_pb2.OpenedSequence(
            token_id=None if request.carry.levels else job.next_token,
            # Without a round in between it is the one that came.
            carry=request.carry if request.carry.levels else _carry_to(job.levels),
            times=messages.times_to(job.times),
        )
        return StepReply(
            target_pb2.VerifyResponse(opened=opened),
            "prefill",
            {"queue": job.times.queue_ns, "forward": job.times.forward_ns},
            {"tandem.prompt_tokens": len(token_ids)},
        )

    def _check_open(self, request: target_pb2.OpenSequence, token_ids: list[int]) -> None:
        messages.check_tokens("open.token_ids", token_ids, self._engine.decoder.vocab_size)
        if request.verifier not in VERIFIERS:
            raise InvalidRequest(
                f"open.verifier {request.verifier!r} is unknown; use one of {sorted(VERIFIERS)}"
            )
        if request.max_new_tokens < 1:
            raise InvalidRequest("open.max_new_tokens must be at least 1")
        length, limit = len(token_ids) + request.max_new_tokens, self._servicer.max_length
        if length > limit:
            raise InvalidRequest(
                f"open.max_new_tokens: {len(token_ids)} prompt tokens and"
                f" {request.max_new_tokens} new ones exceed the target's {limit}"
            )
        fixed = request.verifier == GreedyBlockVerifier.name
        limit = self._servicer.settings.max_gamma
        if fixed and not 1 <= request.gamma <= limit:
            raise InvalidRequest(f"open.gamma must be 1..{limit} for greedy_block")
        if not fixed and request.gamma:
            raise InvalidRequest(f"open.gamma must be 0 for {request.verifier}")

    async def step(self, message: target_pb2.VerifyRequest) -> StepReply[target_pb2.VerifyResponse]:
        request, settings = message.verify, self._servicer.settings
        self._progress.check(request.round, request.position)
        sequence = self._sequence
        assert sequence is not None  # no step comes before open
        draft = messages.draft_from(
            request.draft, self._engine.decoder.vocab_size, settings.max_gamma
        )
        self._check_length(len(draft))
        job = await self._engine.verify(sequence, request.round, draft)
        self._progress = Progress(sequence.length, request.round)
        verdict = target_pb2.Verdict(
            round=request.round,
            position=self._progress.length,
            num_accepted=job.num_accepted,
            next_token_id=job.next_token,
            overlaps=job.overlaps,
            carry=_carry_to(job.levels),
            times=messages.times_to(job.times),
        )
        times = job.times
        return StepReply(
            target_pb2.VerifyResponse(verdict=verdict),
            "verify",
            {
                "queue": times.queue_ns,
                "forward": times.forward_ns,
                "accept": times.accept_ns,
            },
            {
                "tandem.round": request.round,
                "tandem.gamma": len(draft),
                "tandem.accepted": job.num_accepted,
                "tandem.verifier": sequence.rule.name,
                "tandem.batch_size": times.batch_size,
            },
            partial(sequence.uniforms.prepare, request.round + 1, len(draft)),
        )

    def _check_length(self, gamma: int) -> None:
        left = self._end - self._progress.length
        if left < 1:
            raise WrongState("all of max_new_tokens have been emitted")
        if gamma > left:
            raise InvalidRequest(
                f"draft.token_ids holds {gamma} tokens; max_new_tokens leaves {left}"
            )
        if self._gamma and gamma != min(self._gamma, left):
            raise InvalidRequest(
                f"draft.token_ids holds {gamma} tokens; greedy_block needs"
                f" {min(self._gamma, left)} (its fixed gamma, or what is left)"
            )

    def release(self) -> None:
        if self._sequence is not None:
            self._engine.release(self._sequence)


def _carry_from(request: target_pb2.OpenSequence) -> GreedyBlockCarry | None:
    levels = [(level.log_ratio, level.count) for level in request.carry.levels]
    if len(levels) >= max(request.gamma, 1):
        raise InvalidRequest(f"open.carry holds {len(levels)} levels, gamma allows fewer")
    for log_ratio, count in levels:
        if not math.isfinite(log_ratio) or not 1 <= count < request.gamma:
            raise InvalidRequest(
                f"open.carry: log_ratio must be finite and count 1..{request.gamma - 1},"
                f" got {log_ratio} and {count}"
            )
    if not levels:
        return None
    return GreedyBlockCarry.from_levels(levels, request.gamma)


def _carry_to(levels: list[tuple[float, int]] | None) -> common_pb2.VerifierCarry | None:
    if levels is None:
        return None
    return common_pb2.VerifierCarry(
        levels=[
            common_pb2.VerifierCarry.Level(log_ratio=log_ratio, count=count)
            for log_ratio, count in levels
        ]
    )


def make_service(settings: TargetSettings) -> Service:
    """The target as `tandem.rpc.server` runs it."""
    servicer = TargetServicer(settings)
    return Service(
        "tandem.target.v1.TargetService",
        lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server),
        servicer.become_ready,
        servicer.stop,
        servicer.lost.wait,
    )
