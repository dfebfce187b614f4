"""Texts, made from requests: the one way in, whatever the front end speaks."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager

import structlog

from orchestrator.front.client import ReadingClient
from orchestrator.front.queue import QueueLimits, TextQueue
from orchestrator.front.text_parts import TextParts
from orchestrator.front.validation import Validator, request_id_of
from orchestrator.pool.peers_of_text import PeersOfText
from orchestrator.pool.pool import ReplicaPool
from orchestrator.pool.prefixes import Prefix
from orchestrator.pool.retry_budget import RetryBudget
from orchestrator.settings import OrchestratorSettings
from orchestrator.sizes.policies import SizePolicies
from tandem.peers.text.metrics import RequestMetrics
from tandem.peers.text.record import GRPC, TextRecord, TextSpans
from tandem.peers.text.values import Generation, Request, Round, Summary
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
        validator: of the first pair.
        metrics: of requests; None if they are not read.
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
        prefix = None
        if self._settings.route_by_prefix:
            prefix = Prefix(generation.prompt_ids, generation.cache_salt, generation.cache_key)
        with PeersOfText(
            self._pool,
            validator.capabilities,
            record.remaining,
            self._budget,
            self._settings,
            record,
            prefix,
        ) as peers:
            parts = TextParts(generation, validator, peers, self._pool, self._settings, record)
            emission = parts.emission
            await emission.resume(generation.received_ids)
            if emission.finish_reason is None:
                try:
                    async with aclosing(parts.session(self._sizes).rounds()) as rounds:
                        async for round_ in rounds:
                            record.commit(round_)
                            yield round_
                finally:
                    peers.remember(parts.target.token_ids)
        assert emission.finish_reason is not None
        counts = record.counts
        record.spans.describe(
            {
                "gen_ai.usage.output_tokens": counts.new_tokens,
                "gen_ai.response.finish_reasons": [emission.finish_reason.value],
                "gen_ai.usage.cache_read.input_tokens": counts.cached_tokens.get("target", 0),
                "tandem.accepted": counts.accepted_tokens,
                "tandem.drafter_cached_tokens": counts.cached_tokens.get("drafter", 0),
                "tandem.drafter_weights_version": counts.weights_version,
            }
        )
        yield Summary(
            generation=generation,
            finish_reason=emission.finish_reason,
            stop_string=emission.stop_string,
            counts=counts,
            times=record.times,
            drafter_lost=parts.drafter.lost,
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
