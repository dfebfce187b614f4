"""Every metric of the services: the one list from which all that reads metrics follows.

`instruments` makes them for Prometheus, `otlp` sends the same ones by OTLP, and the table
in docs/telemetry.md is held against this list and against what a run of the services emits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tandem.telemetry.tracing.ids import SpanIds

DRAFTER, TARGET, ORCHESTRATOR = "drafter", "target", "orchestrator"
_MODELS = (DRAFTER, TARGET)
_ALL = (DRAFTER, TARGET, ORCHESTRATOR)

# Prometheus spells units out, and has none for what is merely counted.
_UNITS = {"s": "seconds", "By": "bytes"}

# A pass of a small model takes a tenth of a millisecond, a text of a large one a minute.
_STAGE_SECONDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# The next three are those of the semantic conventions, with finer ones below for small models.
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_OUTPUT_TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_REQUEST_SECONDS = (
    *(0.0025, 0.005),
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
# The loop's own clock counts milliseconds.
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_BATCH_SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")


class MetricKind(Enum):
    """How a metric is kept."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, as OpenTelemetry names it.

    Attributes:
        name: with dots.
        kind: see there.
        unit: as UCUM writes it.
        meaning: a sentence for people, without its full stop.
        labels: names of its attributes, in the order in which their values are given.
        buckets: upper bounds of a histogram's.
        roles: services that have it.
    """

    name: str
    kind: MetricKind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    roles: tuple[str, ...] = (ORCHESTRATOR,)

    @property
    def prometheus_unit(self) -> str:
        """As the end of its name in Prometheus; empty for what is counted."""
        return _UNITS.get(self.unit, "")

    @property
    def prometheus_name(self) -> str:
        """By which queries find it; a histogram's series add _bucket, _sum and _count to it."""
        unit = f"_{self.prometheus_unit}" if self.prometheus_unit else ""
        total = "_total" if self.kind is MetricKind.COUNTER else ""
        return f"{underscored(self.name)}{unit}{total}"


def underscored(name: str) -> str:
    """A name of OpenTelemetry as Prometheus writes it."""
    return name.replace(".", "_")


def exemplar_of(span: SpanIds | None) -> dict[str, str] | None:
    """What leads from a measurement to its trace; None where it has none."""
    if span is None:
        return None
    return {"trace_id": f"{span.trace_id:032x}", "span_id": f"{span.span_id:016x}"}


REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    MetricKind.HISTOGRAM,
    "s",
    "From a request's arrival to its end, whatever the end was",
    (*_GEN_AI, "error.type"),
    _REQUEST_SECONDS,
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    MetricKind.HISTOGRAM,
    "s",
    "From a request's arrival to its first token on the wire",
    _GEN_AI,
    _FIRST_TOKEN_SECONDS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    MetricKind.HISTOGRAM,
    "s",
    "Mean time a token behind the first one, of texts that came to their end",
    _GEN_AI,
    _OUTPUT_TOKEN_SECONDS,
)
REQUESTS = Metric(
    "tandem.requests",
    MetricKind.COUNTER,
    "{request}",
    "Requests that ended, each once, by gRPC status and, with OK, by finish reason",
    ("status", "finish_reason"),
)
REQUESTS_ACTIVE = Metric(
    "tandem.requests.active", MetricKind.GAUGE, "{request}", "Texts that are being generated"
)
REPLICAS = Metric(
    "tandem.replicas",
    MetricKind.GAUGE,
    "{replica}",
    "Replicas of a service that texts may go to now",
    ("role",),
)
ROUNDS = Metric(
    "tandem.rounds",
    MetricKind.COUNTER,
    "{round}",
    "Rounds that were committed, drafted or not, without those drawn from a prefill",
)
NUM_DRAFTS = Metric(
    "tandem.spec_decode.num_drafts",
    MetricKind.COUNTER,
    "{draft}",
    "Drafts of at least one token that were decided",
)
NUM_DRAFT_TOKENS = Metric(
    "tandem.spec_decode.num_draft_tokens", MetricKind.COUNTER, "{token}", "Tokens of those drafts"
)
NUM_ACCEPTED_TOKENS = Metric(
    "tandem.spec_decode.num_accepted_tokens", MetricKind.COUNTER, "{token}", "Drafted tokens kept"
)
NUM_ACCEPTED_TOKENS_PER_POS = Metric(
    "tandem.spec_decode.num_accepted_tokens_per_pos",
    MetricKind.COUNTER,
    "{token}",
    "Drafted tokens kept, by their place in the draft, from 0",
    ("position",),
)
WASTED_TOKENS = Metric(
    "tandem.spec_decode.wasted_tokens",
    MetricKind.COUNTER,
    "{token}",
    "Drafted tokens for nothing: of drafts that were never decided, since the target was lost or"
    " the text over (undecided), or kept ones behind a text's end (behind_end)",
    ("reason",),
)
DRAFT_PAYLOAD = Metric(
    "tandem.draft.payload", MetricKind.COUNTER, "By", "Size of the decided drafts' distributions"
)
DRAFTERS_LOST = Metric(
    "tandem.drafters.lost",
    MetricKind.COUNTER,
    "{text}",
    "Texts whose drafter failed, was full, too slow or not there",
)
TOKENS_EMITTED = Metric(
    "tandem.tokens.emitted",
    MetricKind.COUNTER,
    "{token}",
    "Tokens emitted, by origin: prefill, accepted, correction or bonus",
    ("origin",),
)
TOKENS_PROMPT = Metric(
    "tandem.tokens.prompt", MetricKind.COUNTER, "{token}", "Prompt tokens of accepted requests"
)
STAGE_DURATION = Metric(
    "tandem.stage.duration",
    MetricKind.HISTOGRAM,
    "s",
    "Time in a stage of a step: prefill and draft at the drafter, prefill and verify at the"
    " target; at the orchestrator a step is a whole text, whose stages sum to its wall time",
    ("role", "step", "stage"),
    _STAGE_SECONDS,
    _ALL,
)
BATCH_SIZE = Metric(
    "tandem.batch.size",
    MetricKind.HISTOGRAM,
    "{sequence}",
    "Sequences that shared a forward pass",
    ("role",),
    _BATCH_SEQUENCES,
    _MODELS,
)
QUEUE_DEPTH = Metric(
    "tandem.queue.depth",
    MetricKind.GAUGE,
    "{sequence}",
    "Sequences that wait for a place; at the orchestrator prompts that wait to be encoded",
    ("role",),
    roles=_ALL,
)
SEQUENCES_OPEN = Metric(
    "tandem.sequences.open",
    MetricKind.GAUGE,
    "{sequence}",
    "Sequences that hold a place",
    ("role",),
    roles=_MODELS,
)
KV_POSITIONS = Metric(
    "tandem.kv.positions",
    MetricKind.GAUGE,
    "{token}",
    "Positions of the KV cache that new sequences get a part of: reserved (used) or not (free)",
    ("role", "state"),
    roles=_MODELS,
)
EVENT_LOOP_LAG = Metric(
    "tandem.event_loop.lag",
    MetricKind.HISTOGRAM,
    "s",
    "How much later than due the event loop woke, ten times a second",
    ("role",),
    _LAG_SECONDS,
    _ALL,
)

METRICS = (
    REQUEST_DURATION,
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    REQUESTS,
    REQUESTS_ACTIVE,
    REPLICAS,
    ROUNDS,
    NUM_DRAFTS,
    NUM_DRAFT_TOKENS,
    NUM_ACCEPTED_TOKENS,
    NUM_ACCEPTED_TOKENS_PER_POS,
    WASTED_TOKENS,
    DRAFT_PAYLOAD,
    DRAFTERS_LOST,
    TOKENS_EMITTED,
    TOKENS_PROMPT,
    STAGE_DURATION,
    BATCH_SIZE,
    QUEUE_DEPTH,
    SEQUENCES_OPEN,
    KV_POSITIONS,
    EVENT_LOOP_LAG,
)
