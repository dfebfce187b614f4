"""Texts, made from requests: the one way in, whatever the front end speaks."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager

import structlog

from orchestrator.front.client import ReadingClient
from orchestrator.front.queue import QueueLimits, TextQueue
from orchestrator.front.validation import Validator, request_id_of
from orchestrator.pool.peers_of_text import PeersOfText
from orchestrator.pool.pool import ReplicaPool
from orchestrator.pool.retry_budget import RetryBudget
from orchestrator.settings import OrchestratorSettings
from orchestrator.sizes.policies import SizePolicies
from orchestrator.text.emission import Emission
from orchestrator.text.session import Session
from orchestrator.text.target_failover import TargetWithFailover
from tandem.errors import TandemError
from tandem.peers.replicas.compatibility import Capabilities
from tandem.peers.text.contracts import DraftSize
from tandem.peers.text.drafter_failover import DrafterWithFailover
from tandem.peers.text.metrics import RequestMetrics
from tandem.peers.text.record import GRPC, TextRecord, TextSpans
from tandem.peers.text.values import Generation, Request, Round, Summary
from tandem.rpc.messages import AROUND_BYTES
from tandem.telemetry.logs import bind_request

_log = structlog.get_logger(__name__)


class Texts:
    """Makes texts over a pool of drafters and targets.

    Attributes:
        active: texts being made, or waiting for their slots.
        queue: of texts that wait for a slot on a target.
        validator: of the pair, now; a text keeps the one that it began with.

    Args:
        settings: limits and waits.
        pool: picks replicas.
        validator: see there.
        metrics: of requests; None where nobody reads them.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        pool: ReplicaPool,
        validator: Validator,
        metrics: RequestMetrics | None = None,
    ) -> None:
        self.active = 0
        self.validator = validator
        self._settings = settings
        self._pool = pool
        self._metrics = metrics
        self._budget = RetryBudget(settings.retry_share, lambda: self.active)
        self._sizes = SizePolicies(self._texts_of_a_target, settings.ahead)
        limits = QueueLimits(
            settings.max_waiting, settings.queue_seconds, settings.max_client_requests
        )
        self.queue = TextQueue(lambda: pool.room, limits, self._make_room)
        self._reading: set[ReadingClient] = set()  # of texts that have slots

    async def generate(
        self,
        request: Request,
        remaining: float | None = None,
        metadata: Mapping[str, str] = {},
        client: ReadingClient | None = None,
        front: str = GRPC,
    ) -> AsyncGenerator[Round | Summary, None]:
        """A text: its rounds, then its summary. Counted, traced and logged however it ends.

        Close the iterator to stop; what was opened is freed then.

        Args:
            request: what to generate.
            remaining: seconds until the caller's deadline; None for none.
            metadata: of the call; a traceparent in it is the caller's span.
            client: whose text it is; None where all texts are one client's, who reads at once.
            front: that it came by, for the metrics.

        Raises:
            TandemError: the request is refused, or the text failed.
        """
        validator = self.validator
        model = validator.capabilities.target.model
        record = TextRecord(TextSpans(metadata), self._metrics, model, remaining, front)
        client = client or ReadingClient()
        try:
            request_id = request_id_of(request)
            bind_request(request_id)
            record.spans.describe({"tandem.request_id": request_id})
            with self._counted(), self.queue.presence(client.name):
                self.queue.check(client.name, remaining)
                with record.spans.child("tokenize"):
                    generation = await validator.accept(request, request_id, record, client.name)
                self._describe(generation, model, record)
                record.begin(len(generation.prompt_ids))
                async with (
                    self._hold_slot(generation, client, record),
                    aclosing(self._rounds(generation, validator, record)) as rounds,
                ):
                    async for event in rounds:
                        with record.stage("send_wait", span="send"):
                            yield event
                        if isinstance(event, Summary):
                            record.finish(event.finish_reason)
                        else:
                            record.deliver()
        except BaseException as error:
            record.fail(error)
            raise
        finally:
            record.end()
            wall_ms = record.times.elapsed_ns() // 1_000_000
            _log.info("request ended", outcome=record.outcome, wall_ms=wall_ms)

    def _texts_of_a_target(self) -> int:
        """Those that come at once count at once, though only the first one has a slot yet."""
        return math.ceil((self.active - self.queue.waiting) / max(self._pool.target_count, 1))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request while it is here."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    @asynccontextmanager
    async def _hold_slot(
        self,
        generation: Generation,
        client: ReadingClient,
        record: TextRecord,
    ) -> AsyncIterator[None]:
        """Hold a slot on a target, once there is one; see `TextQueue.admitted`."""
        tokens = len(generation.prompt_ids) + generation.stopping.max_new_tokens
        tokens += generation.most_nodes
        async with AsyncExitStack() as stack:
            with record.stage("place_wait", span="wait"):
                await stack.enter_async_context(
                    self.queue.admitted(client.name, tokens, record.remaining)
                )
            self._reading.add(client)
            stack.callback(self._reading.discard, client)
            yield

    def _make_room(self) -> None:
        """Have the text end whose client has read nothing for the longest, if it was for long:
        another one waits for its slot."""
        slowest = min(self._reading, key=lambda client: client.unread_since, default=None)
        if slowest is None:
            return
        if time.monotonic() - slowest.unread_since >= self._settings.full_idle_seconds:
            slowest.give_way("others wait for its place")

    async def _rounds(
        self,
        generation: Generation,
        validator: Validator,
        record: TextRecord,
    ) -> AsyncGenerator[Round | Summary, None]:
        """A session over the text's replicas, and what came of it."""
        settings, rule, capabilities = self._settings, generation.rule, validator.capabilities
        model = capabilities.target
        with PeersOfText(
            self._pool,
            capabilities,
            record.remaining,
            self._budget,
            settings,
            record,
        ) as peers:
            emission = Emission(
                generation.stopping,
                model.eos_token_ids,
                validator.codec.stream(generation.prompt_ids, generation.stopping.strings),
                record.counts,
            )
            await emission.resume(generation.received_ids)
            ends = () if generation.stopping.ignore_eos else tuple(model.eos_token_ids)
            target = TargetWithFailover(
                generation,
                peers,
                model.vocab_size,
                (*generation.stopping.token_ids, *ends),
                capabilities.max_rounds,
            )
            needed_by = rule.name if rule.fixed_gamma else ""

            def lose_drafter(error: TandemError | None) -> None:
                peers.drafting.note_lost(error)
                record.lose_drafter()

            # Drafts of the target itself would be others.
            waits = generation.waits_for_drafter and not capabilities.by_target

            def opening_seconds() -> float:
                length = len(generation.prompt_ids)
                seconds = self._pool.drafter_deadlines.opening(length, bool(needed_by))
                return min(seconds, settings.draft_seconds)

            drafting = capabilities.drafter
            drafter = DrafterWithFailover(
                make=peers.drafter,
                prompt=lambda: target.prompt,
                record=record,
                seconds=opening_seconds,
                needed_by=needed_by,
                on_loss=lose_drafter,
                let_go=peers.let_drafter_go,
                most_feedback_bytes=drafting.max_message_bytes - AROUND_BYTES
                if drafting is not None
                else 0,
                wait_for=peers.drafter_with_room if waits else None,
            )
            own_size = None if waits else own_size_of(capabilities, generation)
            # A rule that needs every draft cannot turn to the target's drafts later.
            alone = bool(needed_by) and own_size is not None and not self._pool.drafter_count
            session = Session(
                generation,
                drafter=drafter,
                target=target,
                policy=self._sizes.policy_for(
                    generation,
                    capabilities.pair,
                    *capabilities.pass_times,
                    # Nothing is prepared for texts whose logits are shaped.
                    prepares=capabilities.prepares and not generation.sampling.shaping,
                ),
                emission=emission,
                record=record,
                own_size=own_size,
                by_target=capabilities.by_target or alone,
                spell=validator.codec.spell if settings.trace_text else None,
            )
            if emission.finish_reason is None:
                async with aclosing(session.rounds()) as rounds:
                    async for round_ in rounds:
                        record.commit(round_)
                        yield round_
        assert emission.finish_reason is not None
        counts = record.counts
        record.spans.describe(
            {
                "gen_ai.usage.output_tokens": counts.new_tokens,
                "gen_ai.response.finish_reasons": [emission.finish_reason.value],
                "tandem.accepted": counts.accepted_tokens,
            }
        )
        yield Summary(
            generation=generation,
            finish_reason=emission.finish_reason,
            stop_string=emission.stop_string,
            counts=counts,
            times=record.times,
            drafter_lost=drafter.lost,
            tail=emission.tail,
            stop_token_id=emission.stop_token_id,
        )

    def _describe(self, generation: Generation, model: str, record: TextRecord) -> None:
        record.spans.describe(
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "tandem",
                "gen_ai.request.model": model,
                "gen_ai.request.max_tokens": generation.stopping.max_new_tokens,
                "gen_ai.request.temperature": generation.sampling.temperature,
                "gen_ai.usage.input_tokens": len(generation.prompt_ids),
                "tandem.verifier": generation.verifier,
                "tandem.gamma": "auto" if generation.gamma is None else generation.gamma,
            }
        )


def own_size_of(
    capabilities: Capabilities, generation: Generation
) -> Callable[[DraftSize], DraftSize] | None:
    """What a text's target drafts itself where a size is chosen; None where it drafts nothing for
    this text."""
    own = capabilities if capabilities.by_target else capabilities.without_drafters
    if own is None or own.drafter is None or generation.rule.name not in own.rules:
        return None
    if generation.rule.fixed_gamma and generation.sizes[0].gamma > own.max_gamma:
        return None
    tokens = len(generation.prompt_ids) + generation.stopping.max_new_tokens
    return own.own_size if tokens <= own.drafter.max_length else None
