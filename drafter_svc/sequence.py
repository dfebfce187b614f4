"""A sequence on the drafter: what a message must be, what is done about it, what is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from opentelemetry.util.types import AttributeValue

from drafter_svc.messages import prepared_to
from drafter_svc.preparing import NOTHING_AHEAD, AheadLimits, Preparing
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.drafting.ahead.prepare import Ahead, AheadDraft, room_for
from tandem.drafting.drafter import Drafter, DraftSequence, go_on
from tandem.engine.asks import Steps
from tandem.engine.engine import Engine
from tandem.errors import InvalidRequest, WrongState
from tandem.online.kept_text import HeardText
from tandem.online.learning import Learning
from tandem.rpc import messages
from tandem.rpc.feedback import Listener, feedback_from
from tandem.rpc.streams.sequence import Progress, StepReply
from tandem.serving.sequence import EngineSequence, shaped_behind
from tandem.shaping.grammar import Grammars
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import Feedback
from tandem.speculation.prepared_outcome import PreparedOutcome
from tandem.speculation.tree import DraftSize
from tandem.telemetry.tracing.ids import SpanIds


class DraftedSequence(
    EngineSequence[drafter_pb2.SequenceRequest, drafter_pb2.SequenceResponse, DraftSequence]
):
    """One sequence of a drafter.

    Args:
        engine: runs its drafts.
        drafter: the method.
        info: limits that were announced.
        grammars: for texts that keep to one.
        limits: of what is prepared ahead.
        shares: whether sequences share computed prefixes.
        learning: from texts; None where nothing is learnt.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter,
        info: common_pb2.ModelInfo,
        grammars: Grammars,
        limits: AheadLimits = NOTHING_AHEAD,
        *,
        shares: bool = True,
        learning: Learning | None = None,
    ) -> None:
        super().__init__(engine, info, shares)
        self._learning = learning
        self._heard: HeardText | None = None
        self._drafter, self._traits = drafter, drafter.traits
        self._grammars = grammars
        self._limits = limits
        self._ahead: Ahead | None = None
        self._preparing: Preparing | None = None
        self._draws = info.parameters > 0  # by a model; only then its rows are shaped
        self._last_draft = -1, 0  # its round, and its candidates and probes together
        self._last_depth = 0

    async def _open(
        self, message: drafter_pb2.SequenceRequest, traced: SpanIds | None
    ) -> StepReply[drafter_pb2.SequenceResponse]:
        request = message.open
        self._accept(request)
        if request.target_vocab_size < 1:
            raise InvalidRequest("open.target_vocab_size must be at least 1")
        token_ids = messages.tokens_from(
            "open.token_ids", request.token_ids, request.target_vocab_size, self._max_length
        )
        prompt_tokens = len(token_ids)
        length = prompt_tokens + request.max_new_tokens
        if request.max_new_tokens < 1 or length > self._max_length:
            raise InvalidRequest(
                f"open.max_new_tokens must be at least 1 and with the {prompt_tokens} prompt"
                f" tokens at most {self._max_length}, got {request.max_new_tokens}"
            )
        sampling = messages.sampling_from(request.sampling)
        sequence = self._sequence = DraftSequence(
            token_ids, sampling, request.target_vocab_size, self._traits.largest_tree
        )
        sequence.salt = self._salt
        kept = not request.cache_salt and (request.learn or not request.HasField("learn"))
        if self._learning is not None and kept:
            self._heard = self._learning.listen(token_ids)
        shaping = sampling.shaping
        if shaping and self._draws:
            if shaping.grammar and not await asyncio.to_thread(lambda: self._grammars.exist):
                shaping = replace(shaping, grammar=None)
            sequence.shaped = await shaped_behind(
                request, shaping, request.target_vocab_size, self._grammars
            )
        if self._limits.nodes and sequence.shaped is None:
            largest = self._traits.largest_tree or self._max_gamma
            sequence.nodes += room_for(self._limits.nodes, largest)
            self._ahead = Ahead(self._drafter, sequence, length)
        if self._limits.nodes:
            self._preparing = Preparing(
                engine=self._engine,
                sequence=sequence,
                ahead=self._ahead,
                limits=self._limits,
                say=lambda answer: self.say(answer),
                request_id=self.request_id,
            )
        self._progress = Progress(prompt_tokens, request.first_round)
        self._end = length
        steps = self._drafter.open(sequence)
        room = self._room(prompt_tokens, in_full=not request.may_be_given_back)
        _, times = await self._engine.open(sequence, steps, room, self.request_id, traced)
        cached = min((cache.found for cache in sequence.caches), default=0)
        version = sequence.caches[0].weights_version if sequence.caches else 0
        return StepReply(
            drafter_pb2.SequenceResponse(
                opened=drafter_pb2.OpenedSequence(
                    times=messages.times_to(times),
                    open_sequences=self._engine.admission.open_sequences,
                    incarnation=self._incarnation,
                    cached_tokens=cached,
                    weights_version=version,
                )
            ),
            "prefill",
            times,
            {
                "tandem.prompt_tokens": prompt_tokens,
                "tandem.cached_tokens": cached,
                **({"tandem.weights_version": version} if version else {}),
                "tandem.batch_size": times.batch_size,
            },
        )

    async def _step(
        self, message: drafter_pb2.SequenceRequest, traced: SpanIds | None
    ) -> StepReply[drafter_pb2.SequenceResponse]:
        request, sequence = message.draft, self._sequence
        self._progress.check(request.round, request.position)
        emitted = self._emitted(request, sequence)
        feedback = self._feedback(request, sequence, self._progress.length + len(emitted))
        if self._heard is not None:
            self._heard.hear(emitted, feedback, self._last_depth)
        if self._preparing is not None:
            self._preparing.stop()
        # From now on nothing is prepared after the last draft, even if that is sent only now.
        self._progress = Progress(self._progress.length + len(emitted), request.round)
        size = DraftSize(request.gamma, request.max_nodes)
        step = request.round, emitted, size, feedback
        steps = (
            _made(self._drafter, sequence, *step)
            if self._ahead is None
            else self._ahead.go_on(*step)
        )
        made, times = await self._engine.run(sequence, steps, self.request_id, traced)
        if request.taken and made.outcome is not PreparedOutcome.HIT:
            raise WrongState("draft.taken: no draft was sent for this round, text and size")
        draft = made.draft
        self._last_draft = request.round, len(draft) + len(draft.probes)
        self._last_depth = draft.depth
        drafted = drafter_pb2.DraftedStep(
            round=request.round,
            position=self._progress.length,
            draft=messages.draft_to(draft),
            times=messages.times_to(times),
            open_sequences=self._engine.admission.open_sequences,
            prepared=prepared_to(made),
        )
        attributes: dict[str, AttributeValue] = {
            "tandem.round": request.round,
            "tandem.gamma": request.gamma,
            "tandem.depth": draft.depth,
            "tandem.nodes": len(draft),
            "tandem.probes": len(draft.probes),
            "tandem.batch_size": times.batch_size,
            "tandem.draft_bytes": draft.ids.nbytes + draft.weights.nbytes,
        }
        if made.outcome is not None:
            attributes["tandem.prepared"] = made.outcome.value
            attributes["tandem.prepared.drafts"] = made.drafts
            attributes["tandem.prepared.ready_ms"] = round(made.ready_ns / 1e6, 3)
        answer = None if request.taken else drafter_pb2.SequenceResponse(drafted=drafted)
        reply = StepReply(answer, "draft", times, attributes)
        if self._preparing is not None:
            self._preparing.expect(request)
            reply.behind = partial(self._go_on_ahead, request, draft)
        return reply

    def unanswered(self, message: drafter_pb2.SequenceRequest) -> bool:
        """A draft that the caller has already."""
        return message.draft.taken

    def _go_on_ahead(self, request: drafter_pb2.DraftStep, draft: Draft) -> None:
        """Draft on after a draft that was sent, unless the next step is there already."""
        if self._preparing is not None and self._progress.last_round == request.round:
            self._preparing.begin(request, draft)

    def release(self) -> None:
        if self._preparing is not None:
            self._preparing.end()
        super().release()
        heard, self._heard = self._heard, None
        if self._learning is not None and heard is not None:
            self._learning.keep(heard)

    def _feedback(
        self, request: drafter_pb2.DraftStep, sequence: DraftSequence, length: int
    ) -> list[Feedback]:
        """What a request tells of the target's passes; with its tokens the text has this length."""
        wanted, last, vocab_size = self._traits.feedback, self._last_draft, sequence.vocab_size
        if not request.feedback:
            return []
        listener = Listener(wanted, request.round, last, length, vocab_size)
        return feedback_from(request.feedback, listener)

    def _emitted(self, request: drafter_pb2.DraftStep, sequence: DraftSequence) -> list[int]:
        """The emitted tokens of a checked request."""
        if request.send_ahead and not (request.ahead and self._limits.nodes):
            raise InvalidRequest(
                "draft.send_ahead needs draft.ahead, and a drafter that prepares drafts"
            )
        if not 1 <= request.gamma <= self._max_gamma:
            raise InvalidRequest(f"draft.gamma must be 1..{self._max_gamma}, got {request.gamma}")
        if request.max_nodes > (most := max(self._traits.largest_tree, request.gamma)):
            raise InvalidRequest(f"draft.max_nodes must be 0..{most}, got {request.max_nodes}")
        held, count = self._progress.length, len(request.new_token_ids)
        if held + count > self._end:
            raise InvalidRequest(
                f"draft.new_token_ids: the sequence would hold {held + count} tokens,"
                f" open announced at most {self._end}"
            )
        emitted = messages.tokens_from(
            "draft.new_token_ids", request.new_token_ids, sequence.vocab_size, self._end
        )
        left = self._end - held - count
        if request.gamma > left:
            raise InvalidRequest(f"draft.gamma is {request.gamma}, max_new_tokens leaves {left}")
        return emitted


def _made(
    drafter: Drafter,
    sequence: DraftSequence,
    round_: int,
    emitted: Sequence[int],
    size: DraftSize,
    feedback: Sequence[Feedback],
) -> Steps[AheadDraft]:
    """The steps of a draft where nothing is prepared, on the engine's thread."""
    if sequence.shaped is not None:
        try:
            sequence.shaped.extend(emitted)
        except InvalidRequest:  # its tokenizer ends texts in another way
            sequence.shaped = None
    draft = yield from go_on(drafter, sequence, round_, emitted, size, feedback)
    return AheadDraft(draft)
