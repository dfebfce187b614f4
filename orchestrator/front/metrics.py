"""What the metrics say of texts: each round as it is committed, each text once, at its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator.text.ledger import Ledger
from orchestrator.text.tally import Tally
from orchestrator.text.values import FinishReason, Origin, Round
from tandem.errors import TandemError
from tandem.rpc.status import code_of
from tandem.telemetry import metrics
from tandem.telemetry.ids import SpanIds
from tandem.telemetry.stages import WAITS

if TYPE_CHECKING:
    from tandem.telemetry.instruments import Instruments

_OPERATION, _PROVIDER = "text_completion", "tandem"
_NS = 1e-9
# A passed deadline reaches us as a cancellation, and its two ends do not agree to the millisecond.
_DEADLINE_SLACK_SECONDS = 0.05


class Meters:
    """An orchestrator's instruments, those of every round at hand.

    Args:
        instruments: to record into.
    """

    def __init__(self, instruments: Instruments) -> None:
        counter = instruments.counter
        self.instruments = instruments
        self.rounds = counter(metrics.ROUNDS)
        self.drafts = counter(metrics.NUM_DRAFTS)
        self.draft_tokens = counter(metrics.NUM_DRAFT_TOKENS)
        self.accepted_tokens = counter(metrics.NUM_ACCEPTED_TOKENS)
        self.payload = counter(metrics.DRAFT_PAYLOAD)
        self.prompt_tokens = counter(metrics.TOKENS_PROMPT)
        self.lost_drafters = counter(metrics.DRAFTERS_LOST)
        self.from_prefill = counter(metrics.TOKENS_EMITTED, "prefill")
        self.from_origin = {
            origin: counter(metrics.TOKENS_EMITTED, origin.value) for origin in Origin
        }
        self.undecided = counter(metrics.WASTED_TOKENS, "undecided")
        self.behind_end = counter(metrics.WASTED_TOKENS, "behind_end")
        text = (metrics.ORCHESTRATOR, "text")
        self.stages = {
            stage: instruments.histogram(metrics.STAGE_DURATION, *text, stage) for stage in WAITS
        }
        # By place in a draft; as many as the longest one had.
        self._kept_at = [counter(metrics.NUM_ACCEPTED_TOKENS_PER_POS, "0")]

    def keep(self, accepted: int) -> None:
        """Count a draft's kept tokens by their places."""
        kept_at = self._kept_at
        while len(kept_at) < accepted:
            position = str(len(kept_at))
            kept_at.append(self.instruments.counter(metrics.NUM_ACCEPTED_TOKENS_PER_POS, position))
        for place in range(accepted):
            kept_at[place].value += 1


class TextMeter:
    """Books one request.

    Args:
        meters: to book in; None books nothing.
        ledger: the text's.
        model: the target's name.
        remaining: seconds until the caller's deadline when the ledger began; None for none.
    """

    def __init__(
        self, meters: Meters | None, ledger: Ledger, model: str, remaining: float | None = None
    ) -> None:
        self._meters = meters
        self._ledger = ledger
        self._model = model
        self._remaining = remaining
        self._tally = Tally()
        self._prefill_tokens = self._draft_bytes = 0
        # Until it is known better: nothing ends a text in silence.
        self._status, self._finish_reason = "INTERNAL", ""

    def accept(self, prompt_tokens: int) -> None:
        """The request is valid, and its text begins."""
        if self._meters is not None:
            self._meters.prompt_tokens.value += prompt_tokens

    def lose_drafter(self) -> None:
        """The text goes on without its drafter, or ends."""
        if self._meters is not None:
            self._meters.lost_drafters.value += 1

    def commit(self, round_: Round, tally: Tally) -> None:
        """A round was committed, and counted by the tally."""
        meters = self._meters
        if meters is None:
            return
        self._tally = tally
        if self._ledger.prefill_tokens > self._prefill_tokens:
            self._prefill_tokens = self._ledger.prefill_tokens
            meters.from_prefill.value += 1
            return
        meters.rounds.value += 1
        accepted, last = tally.accepted[-1], round_.tokens[-1].origin
        emitted = len(round_.tokens) - (last is not Origin.ACCEPTED)
        if emitted:
            meters.from_origin[Origin.ACCEPTED].value += emitted
        if last is not Origin.ACCEPTED:
            meters.from_origin[last].value += 1
        if not round_.gamma:
            return
        meters.drafts.value += 1
        meters.draft_tokens.value += round_.gamma
        meters.payload.value += tally.draft_bytes - self._draft_bytes
        self._draft_bytes = tally.draft_bytes
        if accepted:
            meters.accepted_tokens.value += accepted
            meters.keep(accepted)
        if accepted > emitted:
            meters.behind_end.value += accepted - emitted

    def finish(self, reason: FinishReason) -> None:
        """The text came to its end, and the client has it."""
        self._status, self._finish_reason = "OK", reason.value

    def fail(self, error: BaseException) -> None:
        """The request ends with an error, or its client is gone."""
        self._finish_reason = ""
        if isinstance(error, TandemError):
            self._status = code_of(error).name
        elif isinstance(error, (GeneratorExit, asyncio.CancelledError)):
            late = self._ledger.elapsed_ns() * _NS + _DEADLINE_SLACK_SECONDS
            passed = self._remaining is not None and late >= self._remaining
            self._status = "DEADLINE_EXCEEDED" if passed else "CANCELLED"
        else:
            self._status = "INTERNAL"

    def end(self, span: SpanIds | None) -> None:
        """Book the request, once and for all.

        Args:
            span: the request's; None where it is not traced.
        """
        meters, ledger = self._meters, self._ledger
        if meters is None:
            return
        elapsed_ns, first_ns = ledger.elapsed_ns(), ledger.first_token_ns
        exemplar = metrics.exemplar_of(span)
        instruments = meters.instruments
        gen_ai = (_OPERATION, _PROVIDER, self._model)
        instruments.counter(metrics.REQUESTS, self._status, self._finish_reason).value += 1
        failure = "" if self._status == "OK" else self._status
        duration = instruments.histogram(metrics.REQUEST_DURATION, *gen_ai, failure)
        duration.observe(elapsed_ns * _NS, exemplar)
        undecided = ledger.drafted_tokens - self._tally.drafted_tokens
        if undecided:
            meters.undecided.value += undecided
        if not first_ns:
            return
        first = instruments.histogram(metrics.TIME_TO_FIRST_TOKEN, *gen_ai)
        first.observe(first_ns * _NS, exemplar)
        later = self._tally.new_tokens - 1
        if later > 0 and not failure:
            each = instruments.histogram(metrics.TIME_PER_OUTPUT_TOKEN, *gen_ai)
            each.observe((elapsed_ns - first_ns) * _NS / later, exemplar)
        for stage, spent_ns in ledger.stages_ns().items():
            meters.stages[stage].observe(spent_ns * _NS, exemplar)
