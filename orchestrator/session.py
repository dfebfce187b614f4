"""One text: Algorithm 3 of arXiv 2403.10444 over two services.

open both; emit the token that the target draws from its prefill
until the text ends:
    draft gamma tokens behind what was emitted
    have the target decide how many to keep, and what follows them
    emit those, all at once
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Protocol

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span

from orchestrator.gamma import FixedGamma
from orchestrator.generation import (
    EmittedToken,
    FinishReason,
    Generation,
    Origin,
    Round,
    Tally,
)
from orchestrator.text import TextStream
from tandem.errors import TandemError, Unavailable
from tandem.rpc.calls import Decided, DraftCall, Drafted, Prompt, VerifyCall
from tandem.rpc.status import notes_of
from tandem.telemetry.stages import StageClock
from tandem.telemetry.tracing import fail, traceparent, tracer

_log = structlog.get_logger(__name__)


class Waits(Protocol):
    """How long the services may take, in seconds."""

    @property
    def open_seconds(self) -> float: ...
    @property
    def draft_seconds(self) -> float: ...
    @property
    def verify_seconds(self) -> float: ...


class Session:
    """Generates one text.

    Attributes:
        tally: counts so far.
        finish_reason: why the text ended; None while it goes on.

    Args:
        generation: the validated request.
        drafter: a fresh stream, or None to decode plainly.
        target: a fresh stream.
        target_vocab_size: bounds drafted and emitted ids.
        eos_token_ids: of the target.
        text: decodes what is emitted.
        clock: the request's ledger.
        waits: bounds on every wait.
        span: the request's span.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        drafter: DraftCall | None,
        target: VerifyCall,
        target_vocab_size: int,
        eos_token_ids: frozenset[int],
        text: TextStream,
        clock: StageClock,
        waits: Waits,
        span: Span,
    ) -> None:
        self.tally = Tally()
        self.finish_reason: FinishReason | None = None
        self._generation = generation
        self._drafter = drafter
        self._target = target
        self._target_vocab_size = target_vocab_size
        self._eos_token_ids = frozenset() if generation.stopping.ignore_eos else eos_token_ids
        self._gamma = FixedGamma(generation.gamma, generation.needs_every_draft)
        self._text = text
        self._clock = clock
        self._waits = waits
        self._context: Context = trace.set_span_in_context(span)
        self._opening: asyncio.Task[None] | None = None
        self._round = generation.first_round
        self._length = len(generation.prompt_ids)
        # Emitted, and not told to the drafter yet.
        self._news: list[int] = []

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text, if one did."""
        return self._text.stop_string or ""

    async def rounds(self) -> AsyncGenerator[Round, None]:
        """The text, round by round. Both streams are ended when the iterator is.

        Raises:
            TandemError: the target failed, or a fixed draft length cannot be kept.
        """
        try:
            yield await self._open()
            while self.finish_reason is None:
                self._round += 1
                yield await self._next_round()
            await self._say_goodbye()
        finally:
            self._abandon()

    async def _open(self) -> Round:
        """Prefill both in parallel; the target's prefill gives the first token."""
        span = tracer().start_span("open", self._context)
        generation = self._generation
        prompt = Prompt(
            generation.request_id,
            generation.prompt_ids,
            generation.sampling,
            generation.first_round,
            generation.stopping.max_new_tokens,
            self._target_vocab_size,
        )
        if self._drafter is not None:
            self._opening = asyncio.create_task(self._open_drafter(self._drafter, prompt, span))
            # A text may end before anyone asks how the opening went.
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            with self._clock.stage("open_wait"):
                decided = await self._target.open(
                    prompt,
                    # Without drafts all rules are the same, and some refuse to go without.
                    generation.verifier if generation.gamma else "token",
                    generation.gamma if generation.needs_every_draft else 0,
                    traceparent(span),
                    self._waits.open_seconds,
                )
        except BaseException as error:
            fail(span, error)
            raise
        finally:
            span.end()
        self.tally.add_busy(target_prefill=decided.times.forward_ns)
        return self._emit(None, decided)

    async def _open_drafter(self, drafter: DraftCall, prompt: Prompt, span: Span) -> None:
        times = await drafter.open(prompt, traceparent(span), self._waits.open_seconds)
        self.tally.add_busy(drafter_prefill=times.forward_ns)

    async def _next_round(self) -> Round:
        generation = self._generation
        span = tracer().start_span("round", self._context)
        span.set_attribute("tandem.round", self._round)
        try:
            started = time.perf_counter_ns()
            left = generation.stopping.max_new_tokens - self.tally.new_tokens
            gamma = self._gamma.choose(left)
            drafted = await self._draft(gamma, span) if gamma else None
            with self._clock.stage("verify_wait"):
                decided = await self._target.verify(
                    self._round,
                    self._length,
                    drafted,
                    traceparent(span),
                    self._waits.verify_seconds,
                )
            self._measure(drafted, decided, time.perf_counter_ns() - started)
            span.set_attribute("tandem.gamma", len(drafted.token_ids) if drafted else 0)
            span.set_attribute("tandem.accepted", decided.num_accepted)
            span.set_attribute("tandem.verifier", generation.verifier)
            return self._emit(drafted, decided, trace.set_span_in_context(span))
        except BaseException as error:
            fail(span, error)
            raise
        finally:
            span.end()

    async def _draft(self, gamma: int, span: Span) -> Drafted | None:
        """A draft, or None from the moment the drafter fails: the text goes on without."""
        if self._drafter is None:
            return None
        seconds = self._waits.draft_seconds
        try:
            if self._opening is not None:
                # Meanwhile the target's stream is silent: wait no longer than for a draft.
                with self._clock.stage("open_wait"):
                    done, _ = await asyncio.wait((self._opening,), timeout=seconds)
                if not done:
                    raise Unavailable(f"the drafter did not open within {seconds:g} s")
                self._opening.result()
                self._opening = None
            with self._clock.stage("draft_wait"):
                drafted = await self._drafter.draft(
                    self._round,
                    self._length - len(self._news),
                    self._news,
                    gamma,
                    self._generation.needs_every_draft,
                    traceparent(span),
                    seconds,
                )
        except TandemError as error:
            self._lose_drafter(error)
            return None
        self._news = []
        return drafted

    def _lose_drafter(self, error: TandemError) -> None:
        _log.warning("drafter lost", error=str(error), notes=notes_of(error), round=self._round)
        if self._opening is not None:
            self._opening.cancel()
        if self._drafter is not None:
            self._drafter.cancel()
        self._drafter = self._opening = None
        self.tally.drafter_lost = True
        if self._generation.needs_every_draft:
            rule = self._generation.verifier
            raise Unavailable(f"{rule} cannot go on without its drafter; start anew") from error

    def _measure(self, drafted: Drafted | None, decided: Decided, wall_ns: int) -> None:
        tally, verify = self.tally, decided.times
        tally.add_busy(
            verify_queue=verify.queue_ns,
            verify_forward=verify.forward_ns,
            verify_accept=verify.accept_ns,
        )
        if drafted is None:
            return
        draft = drafted.times
        tally.add_busy(draft_queue=draft.queue_ns, draft_forward=draft.forward_ns)
        tally.draft_bytes += drafted.payload_bytes
        tally.round_wall_ns.append(wall_ns)
        tally.round_model_ns.append(draft.forward_ns + verify.forward_ns)

    def _emit(
        self, drafted: Drafted | None, decided: Decided, context: Context | None = None
    ) -> Round:
        """Commit a verdict: tokens and their text, cut behind what ends the text."""
        proposed = drafted.token_ids if drafted else []
        kept = decided.num_accepted
        self.tally.add_round(len(proposed), kept, decided.overlaps)
        last = Origin.BONUS if kept == len(proposed) else Origin.CORRECTION
        emitted = [(token, Origin.ACCEPTED) for token in proposed[:kept]]
        emitted.append((decided.next_token, last))
        self._length += len(emitted)
        self._news += [token for token, _ in emitted]
        span = tracer().start_span("detokenize", context or self._context)
        tokens = []
        with self._clock.stage("detokenize"):
            for token, origin in emitted:
                tokens.append(EmittedToken(token, origin, self._release(token)))
                if self.finish_reason is not None:
                    break
        span.end()
        return Round(self._round, tokens, len(proposed))

    def _release(self, token: int) -> str:
        """The text that a token releases, having seen whether it ends the text."""
        stopping = self._generation.stopping
        self.tally.new_tokens += 1
        if token in self._eos_token_ids:
            self.finish_reason = FinishReason.EOS
        elif token in stopping.token_ids:
            self.finish_reason = FinishReason.STOP_TOKEN
        else:
            text = self._text.push(token)
            if self._text.stop_string is not None:
                self.finish_reason = FinishReason.STOP_STRING
                return text
            if self.tally.new_tokens < stopping.max_new_tokens:
                return text
            self.finish_reason = FinishReason.LENGTH
            return text + self._text.flush()
        return self._text.flush()

    async def _say_goodbye(self) -> None:
        """End both streams in order, so that both services free the sequence at once."""
        calls: list[DraftCall | VerifyCall] = [self._target]
        if self._drafter is not None and self._opening is None:
            calls.append(self._drafter)
        with self._clock.stage("close_wait"):
            await asyncio.gather(*(call.close() for call in calls))

    def _abandon(self) -> None:
        """Cancel what is still open; never waits. Nothing is, after a goodbye."""
        if self._opening is not None:
            self._opening.cancel()
        if self._drafter is not None:
            self._drafter.cancel()
        self._target.cancel()
