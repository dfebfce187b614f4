"""OrchestratorService: the public calls, and a span for each text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any

import grpc
import structlog
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from orchestrator import messages
from orchestrator.generation import Generation
from orchestrator.messages import Terms
from orchestrator.pool import Pool
from orchestrator.session import Session
from orchestrator.settings import OrchestratorSettings
from orchestrator.text import TextCodec
from tandem.errors import Exhausted, IdleTimeout, StartupError, Unavailable
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.server import Service
from tandem.rpc.status import status_boundary
from tandem.telemetry.stages import StageClock
from tandem.telemetry.tracing import context_of, fail, tracer

_log = structlog.get_logger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]
_Send = Callable[[pb.Round], Awaitable[None]]


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves texts over a pool of drafters and targets."""

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._settings = settings
        self._pool = Pool(settings.drafters, settings.targets, settings.connect_seconds)
        self._terms: Terms | None = None
        self._active = 0

    async def become_ready(self) -> None:
        """Find the pair, check that it fits, and take over the target's tokenizer."""
        await self._pool.become_ready()
        verifier, known = self._settings.verifier, self._pool.verifiers
        if verifier not in known:
            raise StartupError(
                f"TANDEM_ORCHESTRATOR_VERIFIER: {verifier!r} is unknown; the target has {known}"
            )
        # Parsing a large vocabulary takes a second.
        codec = await asyncio.to_thread(TextCodec, self._pool.tokenizer_json)
        self._terms = self._make_terms(codec)
        if 0 < self._terms.max_gamma < self._settings.gamma:
            _log.warning(
                "TANDEM_ORCHESTRATOR_GAMMA is beyond the pair's longest draft",
                gamma=self._settings.gamma,
                drafted=self._terms.max_gamma,
            )

    def _make_terms(self, codec: TextCodec) -> Terms:
        target, drafter, settings = self._pool.target, self._pool.drafter, self._settings
        return Terms(
            vocab_size=target.vocab_size,
            target_length=target.max_length,
            drafter_length=drafter.max_length if drafter else 0,
            max_gamma=min(target.max_gamma, drafter.max_gamma) if drafter else 0,
            verifiers=self._pool.verifiers,
            verifier=settings.verifier,
            gamma=settings.gamma,
            max_new_tokens=settings.max_new_tokens,
            codec=codec,
        )

    @property
    def terms(self) -> Terms:
        """What requests are checked against.

        Raises:
            Unavailable: the pair is not ready.
        """
        self._pool.require_ready()
        if self._terms is None:
            raise Unavailable("not ready: reading the target's tokenizer")
        return self._terms

    async def stop(self) -> None:
        """Close the channels."""
        await self._pool.close()

    async def Generate(  # type: ignore[override]  # writes to the context, as grpc.aio allows
        self, request: pb.GenerateRequest, context: _Context
    ) -> None:
        """See orchestrator.proto."""

        async def send(round_: pb.Round) -> None:
            await self._write(context, pb.GenerateResponse(round=round_))

        async with status_boundary(context):
            summary = await self._generate(request.generation, context, send)
            await self._write(context, pb.GenerateResponse(summary=summary))

    async def _write(self, context: _Context, message: pb.GenerateResponse) -> None:
        """Hand a message to a client, who may be slow but not stand still.

        Raises:
            IdleTimeout: flow control let nothing through for too long.
        """
        seconds = self._settings.idle_seconds
        try:
            async with asyncio.timeout(seconds):
                await context.write(message)
        except TimeoutError:
            raise IdleTimeout(
                f"the client read nothing for {seconds:g} s; resume behind what it has"
            ) from None

    async def Complete(self, request: pb.CompleteRequest, context: _Context) -> pb.CompleteResponse:
        """See orchestrator.proto."""
        reply = pb.CompleteResponse()
        texts: list[str] = []

        async def collect(round_: pb.Round) -> None:
            texts.extend(token.text for token in round_.tokens)
            reply.token_ids.extend(token.id for token in round_.tokens)
            reply.origins.extend(token.origin for token in round_.tokens)

        async with status_boundary(context):
            reply.summary.CopyFrom(await self._generate(request.generation, context, collect))
        reply.text = "".join(texts)
        return reply

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: _Context
    ) -> pb.GetModelInfoResponse:
        """See orchestrator.proto."""
        async with status_boundary(context):
            reply = messages.info_to(self.terms, self._pool.target, self._pool.drafter)
            reply.active_requests = self._active
        return reply

    async def _generate(self, message: pb.Generation, context: _Context, send: _Send) -> pb.Summary:
        """One text under its span, counted and logged however it ends."""
        clock = StageClock()
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        span = tracer().start_span("generate", context_of(metadata), SpanKind.SERVER)
        outcome = "error"
        try:
            request_id = messages.request_id_of(message)
            structlog.contextvars.bind_contextvars(request_id=request_id)
            span.set_attribute("tandem.request_id", request_id)
            with self._place():
                generation = await self._read(message, request_id, clock, span)
                summary = await self._run(generation, context, send, clock, span)
            outcome = pb.FinishReason.Name(summary.finish_reason)
            return summary
        except BaseException as error:
            outcome = type(error).__name__
            fail(span, error)
            raise
        finally:
            span.end()
            _log.info("request ended", outcome=outcome, wall_ms=clock.elapsed_ns() // 1_000_000)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Take one of the places for texts.

        Raises:
            Exhausted: every place is taken.
        """
        limit = self._settings.max_requests
        if self._active >= limit:
            raise Exhausted(f"all {limit} places are taken; try again later, with backoff")
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1

    async def _read(
        self, message: pb.Generation, request_id: str, clock: StageClock, span: Span
    ) -> Generation:
        terms = self.terms
        with tracer().start_as_current_span("tokenize", trace.set_span_in_context(span)):
            generation = await messages.generation_from(message, request_id, terms, clock)
        span.set_attributes(
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "tandem",
                "gen_ai.request.model": self._pool.target.model,
                "gen_ai.request.max_tokens": generation.stopping.max_new_tokens,
                "gen_ai.request.temperature": generation.sampling.temperature,
                "gen_ai.usage.input_tokens": len(generation.prompt_ids),
                "tandem.verifier": generation.verifier,
                "tandem.gamma": generation.gamma,
            }
        )
        return generation

    async def _run(
        self,
        generation: Generation,
        context: _Context,
        send: _Send,
        clock: StageClock,
        span: Span,
    ) -> pb.Summary:
        remaining = context.time_remaining()
        first_token_ns = 0
        with ExitStack() as leases:
            drafting = self._pool.pick_drafter() if generation.gamma else None
            drafter = leases.enter_context(drafting.lease()) if drafting else None
            target = leases.enter_context(self._pool.pick_target().lease())
            session = Session(
                generation,
                drafter=drafter.sequence(remaining) if drafter else None,
                target=target.sequence(remaining),
                target_vocab_size=self._pool.target.vocab_size,
                eos_token_ids=frozenset(self._pool.target.eos_token_ids),
                text=self.terms.codec.stream(generation.prompt_ids, generation.stopping.strings),
                clock=clock,
                waits=self._settings,
                span=span,
            )
            async with aclosing(session.rounds()) as rounds:
                async for round_ in rounds:
                    reply = messages.round_to(round_)
                    with clock.stage("send_wait"):
                        await send(reply)
                    first_token_ns = first_token_ns or clock.elapsed_ns()
            if drafting is not None and session.tally.drafter_lost:
                drafting.note_failure()
        assert session.finish_reason is not None
        stages = messages.stages_to(clock, session.tally, first_token_ns)
        span.set_attribute("gen_ai.usage.output_tokens", session.tally.new_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", [session.finish_reason.value])
        span.set_attribute("tandem.accepted", session.tally.accepted_tokens)
        return messages.summary_to(
            generation, session.tally, session.finish_reason, session.stop_string, stages
        )


def make_service(settings: OrchestratorSettings) -> Service:
    """The orchestrator as `tandem.rpc.server` runs it."""
    servicer = OrchestratorServicer(settings)
    return Service(
        "tandem.orchestrator.v1.OrchestratorService",
        lambda server: orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(
            servicer, server
        ),
        servicer.become_ready,
        servicer.stop,
    )
