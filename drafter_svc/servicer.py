"""DrafterService: one stream is one sequence."""

from __future__ import annotations

from functools import partial

import grpc
import structlog

from drafter_svc.drafters.drafter import DraftSequence
from drafter_svc.drafters.model import ModelDrafter
from drafter_svc.engine import DrafterEngine
from drafter_svc.settings import DrafterSettings
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.errors import InvalidRequest
from tandem.inference.admission import AdmissionLimits
from tandem.inference.decoder import Decoder
from tandem.inference.engine import BatchLimits
from tandem.inference.model_servicer import ModelServicer
from tandem.rpc import messages
from tandem.rpc.model_info import engine_stats, model_info
from tandem.rpc.sequence import Progress, SequenceStream, StepReply
from tandem.rpc.server import Service
from tandem.rpc.status import status_boundary

_Context = grpc.aio.ServicerContext[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse]


class DrafterServicer(
    ModelServicer[DrafterSettings, DrafterEngine], drafter_pb2_grpc.DrafterServiceServicer
):
    """Serves a drafter engine, once its model is loaded."""

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings, "drafter")

    def _make_engine(
        self, decoder: Decoder, admission: AdmissionLimits, batch: BatchLimits
    ) -> DrafterEngine:
        settings = self.settings
        drafter = ModelDrafter(decoder, settings.draft_mass, settings.draft_support)
        return DrafterEngine(decoder, drafter, admission, batch)

    async def Draft(self, request_iterator: object, context: _Context) -> None:  # type: ignore[override]
        """See drafter.proto."""
        async with status_boundary(context):
            await _DraftStream(self, context).run()

    async def GetModelInfo(
        self,
        request: drafter_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[
            drafter_pb2.GetModelInfoRequest, drafter_pb2.GetModelInfoResponse
        ],
    ) -> drafter_pb2.GetModelInfoResponse:
        """See drafter.proto."""
        async with status_boundary(context):
            return drafter_pb2.GetModelInfoResponse(
                info=model_info(self.engine, self.max_length, self.settings.max_gamma),
                stats=engine_stats(self.engine),
                drafter=self.engine.drafter.name,
                draft_support=self.settings.draft_support,
            )


class _DraftStream(SequenceStream[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse]):
    """One sequence's stream."""

    def __init__(self, servicer: DrafterServicer, context: _Context) -> None:
        super().__init__(context, "draft", servicer.settings.idle_seconds)
        self._servicer = servicer
        self._engine = servicer.engine
        self._sequence: DraftSequence | None = None
        self._progress: Progress
        self._end = 0

    async def open(self, message: drafter_pb2.DraftRequest) -> StepReply[drafter_pb2.DraftResponse]:
        request = message.open
        messages.check_request_id(request.request_id)
        structlog.contextvars.bind_contextvars(request_id=request.request_id)
        token_ids, max_length = list(request.token_ids), self._servicer.max_length
        messages.check_tokens("open.token_ids", token_ids, self._engine.decoder.vocab_size)
        if request.target_vocab_size < 1:
            raise InvalidRequest("open.target_vocab_size must be at least 1")
        length = len(token_ids) + request.max_new_tokens
        if request.max_new_tokens < 1 or length > max_length:
            raise InvalidRequest(
                f"open.max_new_tokens must be at least 1 and with the {len(token_ids)} prompt"
                f" tokens at most {max_length}, got {request.max_new_tokens}"
            )
        self._sequence = DraftSequence(
            token_ids, messages.sampling_from(request.sampling), request.target_vocab_size
        )
        self._progress = Progress(len(token_ids), request.first_round)
        self._end = length
        times = await self._engine.open(self._sequence, capacity=length)
        return StepReply(
            drafter_pb2.DraftResponse(
                opened=drafter_pb2.OpenedSequence(times=messages.times_to(times))
            ),
            "prefill",
            {"queue": times.queue_ns, "forward": times.forward_ns},
            {"tandem.prompt_tokens": len(token_ids)},
        )

    async def step(self, message: drafter_pb2.DraftRequest) -> StepReply[drafter_pb2.DraftResponse]:
        request = message.draft
        self._progress.check(request.round, request.position)
        assert self._sequence is not None  # no step comes before open
        new_token_ids = list(request.new_token_ids)
        self._check(request, new_token_ids)
        draft, times = await self._engine.draft(
            self._sequence, request.round, new_token_ids, request.gamma
        )
        self._progress = Progress(self._progress.length + len(new_token_ids), request.round)
        payload = messages.draft_to(draft)
        reply = drafter_pb2.DraftedStep(
            round=request.round,
            position=self._progress.length,
            draft=payload,
            times=messages.times_to(times),
        )
        return StepReply(
            drafter_pb2.DraftResponse(drafted=reply),
            "draft",
            {"queue": times.queue_ns, "forward": times.forward_ns},
            {
                "tandem.round": request.round,
                "tandem.gamma": request.gamma,
                "tandem.batch_size": times.batch_size,
                "tandem.draft_bytes": len(payload.support_ids) + len(payload.weights),
            },
            partial(self._sequence.bits.prepare, request.round + 1, request.gamma),
        )

    def _check(self, request: drafter_pb2.DraftStep, new_token_ids: list[int]) -> None:
        limit = self._servicer.settings.max_gamma
        if not 1 <= request.gamma <= limit:
            raise InvalidRequest(f"draft.gamma must be 1..{limit}, got {request.gamma}")
        vocab_size = self._engine.decoder.vocab_size
        messages.check_tokens("draft.new_token_ids", new_token_ids, vocab_size)
        length = self._progress.length + len(new_token_ids)
        if length > self._end:
            raise InvalidRequest(
                f"draft.new_token_ids: the sequence would hold {length} tokens,"
                f" open announced at most {self._end}"
            )
        if request.gamma > self._end - length:
            raise InvalidRequest(
                f"draft.gamma is {request.gamma}, max_new_tokens leaves {self._end - length}"
            )

    def release(self) -> None:
        if self._sequence is not None:
            self._engine.release(self._sequence)


def make_service(settings: DrafterSettings) -> Service:
    """The drafter as `tandem.rpc.server` runs it."""
    servicer = DrafterServicer(settings)
    return Service(
        "tandem.drafter.v1.DrafterService",
        lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server),
        servicer.become_ready,
        servicer.stop,
        servicer.lost.wait,
    )
