"""Every metric of the services, in one list.

`instruments` makes them for Prometheus, and `otlp` sends the same ones by OTLP. Tests compare the
table in docs/telemetry.md with this list and with what a run of the services emits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

DRAFTER, TARGET, ORCHESTRATOR = "drafter", "target", "orchestrator"
_MODELS = (DRAFTER, TARGET)
_ALL = (DRAFTER, TARGET, ORCHESTRATOR)

# Prometheus spells units out, and has no unit for plain counts.
_UNITS = {"s": "seconds", "By": "bytes"}

# A pass of a small model takes a tenth of a millisecond, a text of a large one a minute.
_STAGE_SECONDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# The next three have the bounds of the semantic conventions, and finer ones for small models.
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
    """How a metric is recorded."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, as OpenTelemetry names it.

    Attributes:
        name: with dots.
        kind: counter, gauge or histogram.
        unit: in UCUM notation.
        meaning: a sentence for people, without its full stop.
        labels: names of its attributes, in the order in which their values are given.
        buckets: upper bounds of a histogram's buckets.
        roles: services that have the metric.
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
        """The unit at the end of its name in Prometheus; empty for a count."""
        return _UNITS.get(self.unit, "")

    @property
    def prometheus_name(self) -> str:
        """Its name in queries; the series of a histogram add _bucket, _sum and _count."""
        unit = f"_{self.prometheus_unit}" if self.prometheus_unit else ""
        total = "_total" if self.kind is MetricKind.COUNTER else ""
        return f"{underscored(self.name)}{unit}{total}"


def underscored(name: str) -> str:
    """The Prometheus form of an OpenTelemetry name."""
    return name.replace(".", "_")


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
    "Mean time per token after the first one, of texts that ended normally",
    _GEN_AI,
    _OUTPUT_TOKEN_SECONDS,
)
REQUESTS = Metric(
    "tandem.requests",
    MetricKind.COUNTER,
    "{request}",
    "Requests that ended, each once, by gRPC status, by finish reason (if the status is OK) and by"
    " API (front)",
    ("status", "finish_reason", "front"),
)
REQUESTS_ACTIVE = Metric(
    "tandem.requests.active", MetricKind.GAUGE, "{request}", "Texts that are being generated"
)
REPLICAS = Metric(
    "tandem.replicas",
    MetricKind.GAUGE,
    "{replica}",
    "Replicas of a service that can take texts now",
    ("role",),
)
ROUNDS = Metric(
    "tandem.rounds",
    MetricKind.COUNTER,
    "{round}",
    "Committed rounds, with or without a draft; tokens drawn from a prefill are not rounds",
)
NUM_DRAFTS = Metric(
    "tandem.spec_decode.num_drafts",
    MetricKind.COUNTER,
    "{draft}",
    "Verified drafts of at least one token",
)
NUM_DRAFT_TOKENS = Metric(
    "tandem.spec_decode.num_draft_tokens", MetricKind.COUNTER, "{token}", "Tokens of those drafts"
)
NUM_ACCEPTED_TOKENS = Metric(
    "tandem.spec_decode.num_accepted_tokens", MetricKind.COUNTER, "{token}", "Accepted draft tokens"
)
NUM_ACCEPTED_TOKENS_PER_POS = Metric(
    "tandem.spec_decode.num_accepted_tokens_per_pos",
    MetricKind.COUNTER,
    "{token}",
    "Accepted draft tokens, by their position in the draft, from 0",
    ("position",),
)
WASTED_TOKENS = Metric(
    "tandem.spec_decode.wasted_tokens",
    MetricKind.COUNTER,
    "{token}",
    "Draft tokens without use, by reason: undecided (the draft was never verified, because the"
    " target was lost or the text had ended) or behind_end (accepted beyond the text's end)",
    ("reason",),
)
DRAFTS_AHEAD = Metric(
    "tandem.drafts.ahead",
    MetricKind.COUNTER,
    "{draft}",
    "Drafts of rounds for which drafts had been prepared ahead, by outcome: ready (hit), still"
    " being made (late), or not among those prepared (miss)",
    ("outcome",),
)
DRAFT_PAYLOAD = Metric(
    "tandem.draft.payload",
    MetricKind.COUNTER,
    "By",
    "Size of the distributions of verified drafts",
)
DRAFTERS_LOST = Metric(
    "tandem.drafters.lost",
    MetricKind.COUNTER,
    "{text}",
    "Texts whose drafter failed, was full, too slow or missing",
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
TOKENS_CACHED = Metric(
    "tandem.tokens.cached",
    MetricKind.COUNTER,
    "{token}",
    "Prompt tokens that the first drafter, or the first target, of their text had computed for an"
    " earlier text",
    ("role",),
)
STAGE_DURATION = Metric(
    name="tandem.stage.duration",
    kind=MetricKind.HISTOGRAM,
    unit="s",
    meaning="Time of a step in a stage. Steps are prefill and draft at the drafter, prefill and"
    " verify at the target. At the orchestrator the step is the whole text, and its stages sum to"
    " its wall time",
    labels=("role", "step", "stage"),
    buckets=_STAGE_SECONDS,
    roles=_ALL,
)
BATCH_SIZE = Metric(
    name="tandem.batch.size",
    kind=MetricKind.HISTOGRAM,
    unit="{sequence}",
    meaning="Sequences that shared a forward pass",
    labels=("role",),
    buckets=_BATCH_SEQUENCES,
    roles=_MODELS,
)
QUEUE_DEPTH = Metric(
    "tandem.queue.depth",
    MetricKind.GAUGE,
    "{sequence}",
    "Sequences that wait for a slot; at the orchestrator, texts that wait for a slot or for"
    " tokenization",
    ("role",),
    roles=_ALL,
)
SEQUENCES_OPEN = Metric(
    "tandem.sequences.open",
    MetricKind.GAUGE,
    "{sequence}",
    "Sequences that hold a slot",
    ("role",),
    roles=_MODELS,
)
KV_POSITIONS = Metric(
    "tandem.kv.positions",
    MetricKind.GAUGE,
    "{token}",
    "Positions of the KV cache that new sequences use: reserved (used), not reserved with a prefix"
    " that can be found (kept), or neither (free)",
    ("role", "state"),
    roles=_MODELS,
)
KV_PROMISED = Metric(
    "tandem.kv.promised",
    MetricKind.GAUGE,
    "{token}",
    "Positions of the KV cache that open sequences may grow to: more than they have reserved, and"
    " perhaps more than there are, where OVERCOMMIT is more than 1",
    ("role",),
    roles=_MODELS,
)
KV_LONGEST = Metric(
    "tandem.kv.longest",
    MetricKind.GAUGE,
    "{token}",
    "Tokens of the longest sequence that would not have to wait for memory",
    ("role",),
    roles=_MODELS,
)
WEIGHTS_VERSION = Metric(
    "tandem.weights.version",
    MetricKind.GAUGE,
    "{version}",
    "How often the weights of new sequences changed while a drafter with ONLINE served; 0 are those"
    " of its checkpoint",
    ("role",),
    roles=(DRAFTER,),
)
LEARNING_TEXTS = Metric(
    "tandem.learning.texts",
    MetricKind.GAUGE,
    "{text}",
    "Texts that a drafter with ONLINE keeps to learn from",
    ("role",),
    roles=(DRAFTER,),
)
# Of weights that are served and weights in training, with the target's rows.
OVERLAPS = ("served", "trained")
LEARNING_OVERLAP = Metric(
    "tandem.learning.overlap",
    MetricKind.GAUGE,
    "1",
    "Newest measurement on texts that are held out: probability that a drafted token is accepted at"
    " temperature 1 (α), with weights that are served or trained",
    ("role", "weights"),
    roles=(DRAFTER,),
)
SEQUENCES_GIVEN_BACK = Metric(
    "tandem.sequences.given_back",
    MetricKind.COUNTER,
    "{sequence}",
    "Sequences whose memory older ones needed; their texts go on when there is room",
    ("role",),
    roles=_MODELS,
)
GUESSES = {True: "right", False: "wrong"}
OVERLAP_ROUNDS = Metric(
    "tandem.overlap.rounds",
    MetricKind.COUNTER,
    "{round}",
    "Rounds without a draft of a target whose layers overlap, in which the next token was guessed:"
    " by whether the token that was drawn is among the guesses",
    ("role", "guess"),
    roles=(TARGET,),
)
PREFIX_CACHE_QUERIES = Metric(
    "tandem.prefix_cache.queries",
    MetricKind.COUNTER,
    "{token}",
    "Prompt tokens that were looked for in the KV cache",
    ("role",),
    roles=_MODELS,
)
PREFIX_CACHE_HITS = Metric(
    "tandem.prefix_cache.hits",
    MetricKind.COUNTER,
    "{token}",
    "Prompt tokens that were found in the KV cache, and not computed again",
    ("role",),
    roles=_MODELS,
)
EVENT_LOOP_LAG = Metric(
    name="tandem.event_loop.lag",
    kind=MetricKind.HISTOGRAM,
    unit="s",
    meaning="Delay of the event loop's wake-ups, measured ten times a second",
    labels=("role",),
    buckets=_LAG_SECONDS,
    roles=_ALL,
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
    DRAFTS_AHEAD,
    DRAFT_PAYLOAD,
    DRAFTERS_LOST,
    TOKENS_EMITTED,
    TOKENS_PROMPT,
    TOKENS_CACHED,
    STAGE_DURATION,
    BATCH_SIZE,
    QUEUE_DEPTH,
    SEQUENCES_OPEN,
    KV_POSITIONS,
    KV_PROMISED,
    KV_LONGEST,
    WEIGHTS_VERSION,
    LEARNING_TEXTS,
    LEARNING_OVERLAP,
    SEQUENCES_GIVEN_BACK,
    OVERLAP_ROUNDS,
    PREFIX_CACHE_QUERIES,
    PREFIX_CACHE_HITS,
    EVENT_LOOP_LAG,
)
