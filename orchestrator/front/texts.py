"""Texts, made from requests: the one way in, whatever the front end speaks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from typing import Any

import structlog

from orchestrator.front.client import Reader
from orchestrator.front.metrics import Meters, TextMeter
from orchestrator.front.queue import Limits, Places
from orchestrator.front.validation import Terms, request_id_of
from orchestrator.replicas.leases import LeasedPeers
from orchestrator.replicas.pool import Pool
from orchestrator.replicas.retry_budget import RetryBudget
from orchestrator.settings import OrchestratorSettings
from orchestrator.sizes.adaptive import AdaptiveSize
from orchestrator.sizes.fixed import FixedSize
from orchestrator.sizes.shared import Adaptation
from orchestrator.text.contracts import Policy
from orchestrator.text.drafter_failover import Drafting
from orchestrator.text.emission import Emission
from orchestrator.text.ledger import Ledger
from orchestrator.text.session import Session
from orchestrator.text.spans import TextSpans
from orchestrator.text.target_failover import Deciding
from orchestrator.text.values import Generation, Request, Round, Summary
from tandem.errors import TandemError
from tandem.telemetry.logs import bind_request

_log = structlog.get_logger(__name__)


class Texts:
    """Makes texts over a pool of drafters and targets.

    Attributes:
        active: texts being made, or waiting for their places.
        places: on targets, and who waits for them.
        terms: of the pair, now; a text keeps those that it began with.

    Args:
        settings: limits and waits.
        pool: picks replicas.
        terms: see there.
        meters: book what becomes of requests; None where nobody reads them.
    """

    def __init__(
        self,
        settings: OrchestratorSettings,
        pool: Pool,
        terms: Terms,
        meters: Meters | None = None,
    ) -> None:
        self.active = 0
        self.terms = terms
        self._settings = settings
        self._pool = pool
        self._meters = meters
        self._budget = RetryBudget(settings.retry_share, lambda: self.active)
        self._adaptation: tuple[Any, Adaptation] | None = None
        limits = Limits(settings.max_waiting, settings.queue_seconds, settings.max_client_requests)
        self.places = Places(lambda: pool.room, limits, self._make_room)
        self._readers: set[Reader] = set()  # of texts that have places

    async def generate(
        self,
        request: Request,
        remaining: float | None = None,
        metadata: Mapping[str, str] = {},
        reader: Reader | None = None,
    ) -> AsyncGenerator[Round | Summary, None]:
        """A text: its rounds, then its summary. Counted, traced and logged however it ends.

        Close the iterator to stop; what was opened is freed then.

        Args:
            request: what to generate.
            remaining: seconds until the caller's deadline; None for none.
            metadata: of the call; a traceparent in it is the caller's span.
            reader: whose text it is; None where all texts are one client's, who reads at once.

        Raises:
            TandemError: the request is refused, or the text failed.
        """
        ledger, spans, terms = Ledger(), TextSpans(metadata), self.terms
        reader = reader or Reader()

        def left() -> float | None:
            return None if remaining is None else max(remaining - ledger.elapsed_ns() / 1e9, 0.0)

        meter = TextMeter(self._meters, ledger, terms.offer.target.model, remaining)
        outcome = "error"
        try:
            request_id = request_id_of(request)
            bind_request(request_id)
            spans.describe({"tandem.request_id": request_id})
            with self._counted(), self.places.presence(reader.name):
                self.places.check(reader.name, remaining)
                with spans.child("tokenize"):
                    generation = await terms.accept(
                        request, request_id, ledger, reader.name, left()
                    )
                self._describe(generation, terms.offer.target.model, spans)
                meter.accept(len(generation.prompt_ids))
                async with (
                    self._place(generation, reader, left(), ledger, spans),
                    aclosing(
                        self._rounds(generation, terms, left(), ledger, spans, meter)
                    ) as rounds,
                ):
                    async for event in rounds:
                        with spans.brief("send"), ledger.stage("send_wait"):
                            yield event
                        if isinstance(event, Summary):
                            outcome = event.finish_reason.name
                            meter.finish(event.finish_reason)
                        elif not ledger.first_token_ns:
                            ledger.first_token_ns = ledger.elapsed_ns()
                            spans.note_first_token()
        except BaseException as error:
            # An iterator that is closed early has a client that left.
            outcome = "ABANDONED" if isinstance(error, GeneratorExit) else type(error).__name__
            spans.fail(error)
            meter.fail(error)
            raise
        finally:
            meter.end(spans.context)
            spans.end()
            _log.info("request ended", outcome=outcome, wall_ms=ledger.elapsed_ns() // 1_000_000)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request while it is here."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    @asynccontextmanager
    async def _place(
        self,
        generation: Generation,
        reader: Reader,
        remaining: float | None,
        ledger: Ledger,
        spans: TextSpans,
    ) -> AsyncIterator[None]:
        """Hold a place on a target, once there is one; see `Places.place`."""
        nodes = max(size.nodes for size in generation.sizes)
        tokens = len(generation.prompt_ids) + generation.stopping.max_new_tokens + nodes
        async with AsyncExitStack() as stack:
            with spans.brief("wait"), ledger.stage("place_wait"):
                await stack.enter_async_context(self.places.place(reader.name, tokens, remaining))
            self._readers.add(reader)
            stack.callback(self._readers.discard, reader)
            yield

    def _make_room(self) -> None:
        """Have the text end whose client has read nothing for the longest, if it was for long:
        another one waits for its place."""
        slowest = min(self._readers, key=lambda reader: reader.unread_since, default=None)
        if slowest is None:
            return
        if time.monotonic() - slowest.unread_since >= self._settings.full_idle_seconds:
            slowest.give_way()

    async def _rounds(
        self,
        generation: Generation,
        terms: Terms,
        remaining: float | None,
        ledger: Ledger,
        spans: TextSpans,
        meter: TextMeter,
    ) -> AsyncGenerator[Round | Summary, None]:
        """A session over leased replicas, and what came of it."""
        settings, rule, target = self._settings, generation.rule, terms.offer.target

        with LeasedPeers(
            self._pool,
            terms.offer,
            remaining,
            self._budget,
            settings.failover_seconds,
            ledger,
            spans,
        ) as peers:
            emission = Emission(
                generation.stopping,
                target.eos_token_ids,
                terms.codec.stream(generation.prompt_ids, generation.stopping.strings),
            )
            emission.resume(generation.received_ids)
            deciding = Deciding(generation, peers, target.vocab_size)
            needed_by = rule.name if rule.fixed_gamma else ""

            def lose_drafter(error: TandemError | None) -> None:
                peers.note_lost_drafter(error)
                meter.lose_drafter()

            def opening_seconds() -> float:
                length = len(generation.prompt_ids)
                seconds = self._pool.drafter_deadlines.opening(length, bool(needed_by))
                return min(seconds, settings.draft_seconds)

            drafting = Drafting(
                peers.drafter,
                lambda: deciding.prompt,
                ledger,
                opening_seconds,
                needed_by,
                lose_drafter,
                peers.let_drafter_go,
            )
            session = Session(
                generation,
                drafting=drafting,
                deciding=deciding,
                policy=self._policy(generation, terms),
                emission=emission,
                ledger=ledger,
                spans=spans,
                spell=terms.codec.spell if settings.trace_text else None,
            )
            if emission.finish_reason is None:
                async with aclosing(session.rounds()) as rounds:
                    async for round_ in rounds:
                        meter.commit(round_, emission.tally)
                        yield round_
        assert emission.finish_reason is not None
        tally = emission.tally
        spans.describe(
            {
                "gen_ai.usage.output_tokens": tally.new_tokens,
                "gen_ai.response.finish_reasons": [emission.finish_reason.value],
                "tandem.accepted": tally.accepted_tokens,
            }
        )
        yield Summary(
            generation,
            emission.finish_reason,
            emission.stop_string,
            tally,
            ledger,
            drafting.lost,
        )

    def _policy(self, generation: Generation, terms: Terms) -> Policy:
        """Fixed where the request leaves nothing open; else all texts of a pair learn together."""
        if len(generation.sizes) == 1:
            (size,) = generation.sizes
            return FixedSize(size.gamma, size.nodes, generation.rule.fixed_gamma)
        drafter = terms.offer.drafter
        pair = (terms.offer.law, None if drafter is None else drafter.fingerprint)
        if self._adaptation is None or self._adaptation[0] != pair:
            # Those that come at once are as many, though the first one has the only place yet.
            self._adaptation = pair, Adaptation(lambda: self.active - self.places.waiting)
        return AdaptiveSize(self._adaptation[1], generation.sizes)

    def _describe(self, generation: Generation, model: str, spans: TextSpans) -> None:
        spans.describe(
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
