"""What the metrics say of texts: each round as it is committed, each request once, at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tandem.peers.text.measures import TextCounts, TextTimes
from tandem.peers.text.values import Origin, Round
from tandem.speculation.prepared_outcome import PreparedOutcome
from tandem.telemetry.metrics import catalog as metrics
from tandem.telemetry.stages import WAITS
from tandem.telemetry.tracing.ids import SpanIds

if TYPE_CHECKING:
    from tandem.telemetry.metrics.instruments import Instruments

_OPERATION, _PROVIDER = "text_completion", "tandem"
_NS = 1e-9


class RequestEnd(NamedTuple):
    """The labels under which an ended request is counted.

    Attributes:
        model: name of the target.
        status: name of a gRPC code.
        finish_reason: of a text that came to its end; else empty.
        front: "grpc" or "http".
    """

    model: str
    status: str
    finish_reason: str
    front: str


class RequestMetrics:
    """An orchestrator's instruments of requests and their rounds.

    Args:
        instruments: to record into.
    """

    def __init__(self, instruments: Instruments) -> None:
        counter = instruments.counter
        self._instruments = instruments
        self._rounds = counter(metrics.ROUNDS)
        self._drafts = counter(metrics.NUM_DRAFTS)
        self._draft_tokens = counter(metrics.NUM_DRAFT_TOKENS)
        self._accepted_tokens = counter(metrics.NUM_ACCEPTED_TOKENS)
        self._payload = counter(metrics.DRAFT_PAYLOAD)
        self._prompt_tokens = counter(metrics.TOKENS_PROMPT)
        self._cached_tokens = {
            role: counter(metrics.TOKENS_CACHED, role) for role in (metrics.DRAFTER, metrics.TARGET)
        }
        self._lost_drafters = counter(metrics.DRAFTERS_LOST)
        self._from_prefill = counter(metrics.TOKENS_EMITTED, "prefill")
        self._from_origin = {
            origin: counter(metrics.TOKENS_EMITTED, origin.value) for origin in Origin
        }
        self._ahead = {
            outcome: counter(metrics.DRAFTS_AHEAD, outcome.value) for outcome in PreparedOutcome
        }
        self._undecided = counter(metrics.WASTED_TOKENS, "undecided")
        self._behind_end = counter(metrics.WASTED_TOKENS, "behind_end")
        text = (metrics.ORCHESTRATOR, "text")
        self._stages = {
            stage: instruments.histogram(metrics.STAGE_DURATION, *text, stage) for stage in WAITS
        }
        # By position in a draft; as many as the longest one had.
        self._kept_at = [counter(metrics.NUM_ACCEPTED_TOKENS_PER_POS, "0")]

    def begin(self, prompt_tokens: int) -> None:
        """A request is valid, and its text begins."""
        self._prompt_tokens.value += prompt_tokens

    def count_cached(self, role: str, tokens: int) -> None:
        """A text was opened at a service that had computed some of its prompt before."""
        self._cached_tokens[role].value += tokens

    def lose_drafter(self) -> None:
        """A text goes on without its drafter, or ends."""
        self._lost_drafters.value += 1

    def count_prepared(self, outcome: PreparedOutcome) -> None:
        """A draft was asked for that might have been prepared."""
        self._ahead[outcome].value += 1

    def prefill(self) -> None:
        """A round was committed whose token the target drew from its prefill."""
        self._from_prefill.value += 1

    def round(self, round_: Round, accepted: int, draft_bytes: int) -> None:
        """A round was committed.

        Args:
            round_: as the client gets it.
            accepted: drafted tokens that the target kept.
            draft_bytes: of the draft's distributions.
        """
        self._rounds.value += 1
        # There is none where no token could come.
        last = round_.tokens[-1].origin if round_.tokens else Origin.ACCEPTED
        emitted = len(round_.tokens) - (last is not Origin.ACCEPTED)
        if emitted:
            self._from_origin[Origin.ACCEPTED].value += emitted
        if last is not Origin.ACCEPTED:
            self._from_origin[last].value += 1
        if not round_.gamma:
            return
        self._drafts.value += 1
        self._draft_tokens.value += round_.gamma
        self._payload.value += draft_bytes
        if accepted:
            self._accepted_tokens.value += accepted
            self._keep(accepted)
        if accepted > emitted:
            self._behind_end.value += accepted - emitted

    def _keep(self, accepted: int) -> None:
        """Count a draft's kept tokens by their positions."""
        kept_at = self._kept_at
        while len(kept_at) < accepted:
            name = str(len(kept_at))
            kept_at.append(self._instruments.counter(metrics.NUM_ACCEPTED_TOKENS_PER_POS, name))
        for position in range(accepted):
            kept_at[position].value += 1

    def end(
        self,
        end: RequestEnd,
        times: TextTimes,
        counts: TextCounts,
        span: SpanIds | None,
    ) -> None:
        """A request has ended.

        Args:
            end: how.
            times: where its time went.
            counts: of what was committed.
            span: the request's; None where it is not traced.
        """
        model, status, finish_reason, front = end
        # One look at the clock: stages add up to the request's duration.
        stages, first_ns = times.stages_ns(), times.first_token_ns
        elapsed_ns = sum(stages.values())
        instruments = self._instruments
        exemplar = instruments.exemplar_of(span)
        gen_ai = (_OPERATION, _PROVIDER, model)
        instruments.counter(metrics.REQUESTS, status, finish_reason, front).value += 1
        failure = "" if status == "OK" else status
        duration = instruments.histogram(metrics.REQUEST_DURATION, *gen_ai, failure)
        duration.observe(elapsed_ns * _NS, exemplar)
        if undecided := times.drafted_tokens - counts.drafted_tokens:
            self._undecided.value += undecided
        if not first_ns:
            return
        first = instruments.histogram(metrics.TIME_TO_FIRST_TOKEN, *gen_ai)
        first.observe(first_ns * _NS, exemplar)
        later = counts.new_tokens - 1
        if later > 0 and not failure:
            each = instruments.histogram(metrics.TIME_PER_OUTPUT_TOKEN, *gen_ai)
            each.observe((elapsed_ns - first_ns) * _NS / later, exemplar)
        for stage, spent_ns in stages.items():
            self._stages[stage].observe(spent_ns * _NS, exemplar)
