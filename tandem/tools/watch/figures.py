"""The main figures of running services, from two scrapes of their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.telemetry.metrics import catalog as metrics
from tandem.telemetry.metrics.catalog import Metric
from tandem.tools.watch.scrape import Scrape


@dataclass(frozen=True)
class WatchedStage:
    """The time that steps spent in a stage.

    Attributes:
        name: such as "verify.forward".
        seconds: mean per step.
        share: of the time of all stages of its step.
    """

    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class WatchedService:
    """A drafter, a target or an orchestrator: all replicas of the role together.

    Attributes:
        role: "drafter", "target" or "orchestrator".
        replicas: number that answer.
        open: open sequences; for an orchestrator, active texts.
        waiting: sequences that wait for a slot; for an orchestrator, waiting prompts.
        kv_share: reserved share of the KV cache; None without a cache.
        promised: to open sequences, as a share of the KV cache; None without a cache.
        longest: tokens of the longest sequence that one replica could open at once; None without a
            cache.
        batch: mean sequences per pass; None without a pass.
    """

    role: str
    replicas: int
    open: int
    waiting: int
    kv_share: float | None
    promised: float | None
    longest: int | None
    batch: float | None


@dataclass(frozen=True)
class WatchedFigures:
    """Figures of all services, over the time between two scrapes.

    Attributes:
        seconds: between the two scrapes.
        tokens: emitted tokens a second.
        rounds: rounds a second.
        requests: ended requests a second.
        failed: requests a second that ended with another status than OK.
        acceptance: share of drafted tokens that were accepted; None without a draft.
        block_efficiency: accepted tokens per draft, plus 1; None without a draft.
        cached: share of prompt tokens that targets had computed before; None without a prompt.
        services: those that answer.
        stages: of steps, and of texts that ended.
    """

    seconds: float
    tokens: float
    rounds: float
    requests: float
    failed: float
    acceptance: float | None
    block_efficiency: float | None
    cached: float | None
    services: Sequence[WatchedService]
    stages: Sequence[WatchedStage] = field(default_factory=tuple)


def figures(before: Mapping[str, Scrape], after: Mapping[str, Scrape]) -> WatchedFigures:
    """The figures of all services together.

    Args:
        before: the earlier scrapes, by endpoint; an endpoint that is missing here counts as
            unchanged.
        after: the later scrapes, by endpoint.
    """
    grown = {name: now.since(before.get(name, now)) for name, now in after.items()}
    spans = [now.at - before[name].at for name, now in after.items() if name in before]
    seconds = max(spans, default=0.0)

    def total(metric: Metric, **labels: str) -> float:
        return sum(scrape.value(metric.prometheus_name, **labels) for scrape in grown.values())

    def rate(metric: Metric, **labels: str) -> float:
        return total(metric, **labels) / seconds if seconds else 0.0

    drafts, drafted = total(metrics.NUM_DRAFTS), total(metrics.NUM_DRAFT_TOKENS)
    accepted = total(metrics.NUM_ACCEPTED_TOKENS)
    prompt, cached = total(metrics.TOKENS_PROMPT), total(metrics.TOKENS_CACHED, role=metrics.TARGET)
    return WatchedFigures(
        seconds=seconds,
        tokens=rate(metrics.TOKENS_EMITTED),
        rounds=rate(metrics.ROUNDS),
        requests=rate(metrics.REQUESTS),
        failed=rate(metrics.REQUESTS) - rate(metrics.REQUESTS, status="OK"),
        acceptance=accepted / drafted if drafted else None,
        block_efficiency=1 + accepted / drafts if drafts else None,
        cached=cached / prompt if prompt else None,
        services=_services(after, grown),
        stages=_stages(grown),
    )


def _services(after: Mapping[str, Scrape], grown: Mapping[str, Scrape]) -> list[WatchedService]:
    found = []
    for role in (metrics.ORCHESTRATOR, metrics.DRAFTER, metrics.TARGET):
        own = [name for name, scrape in after.items() if _role_of(scrape) == role]
        if not own:
            continue
        places = metrics.SEQUENCES_OPEN
        held = metrics.REQUESTS_ACTIVE if role == metrics.ORCHESTRATOR else places

        def now(metric: Metric, own: Sequence[str] = own, **labels: str) -> float:
            return sum(after[name].value(metric.prometheus_name, **labels) for name in own)

        cache = now(metrics.KV_POSITIONS)
        longest = metrics.KV_LONGEST.prometheus_name
        batch = metrics.BATCH_SIZE.prometheus_name
        passes = sum(grown[name].value(f"{batch}_count") for name in own)
        sequences = sum(grown[name].value(f"{batch}_sum") for name in own)
        found.append(
            WatchedService(
                role,
                len(own),
                int(now(held)),
                int(now(metrics.QUEUE_DEPTH)),
                now(metrics.KV_POSITIONS, state="used") / cache if cache else None,
                now(metrics.KV_PROMISED) / cache if cache else None,
                int(max(after[name].value(longest) for name in own)) if cache else None,
                sequences / passes if passes else None,
            )
        )
    return found


def _role_of(scrape: Scrape) -> str:
    """A service's role: a label of its event loop's lag, which every service reports."""
    name = f"{metrics.EVENT_LOOP_LAG.prometheus_name}_count"
    return next((labels["role"] for labels, _ in scrape.series(name)), "")


def _stages(grown: Mapping[str, Scrape]) -> list[WatchedStage]:
    """The stages of each step, the longest first."""
    name = metrics.STAGE_DURATION.prometheus_name
    spent: dict[tuple[str, str], dict[str, float]] = {}
    counts: dict[tuple[str, str], dict[str, float]] = {}
    for scrape in grown.values():
        for end, into in (("_sum", spent), ("_count", counts)):
            for labels, value in scrape.series(f"{name}{end}"):
                of = into.setdefault((labels["role"], labels["step"]), {})
                of[labels["stage"]] = of.get(labels["stage"], 0.0) + value
    stages = []
    for (role, step), own in sorted(spent.items()):
        steps = max(counts[role, step].values())
        whole = sum(own.values())
        if not steps or not whole:
            continue
        shown = f"{role} {step}" if step == "prefill" else step
        for stage, seconds in sorted(own.items(), key=lambda item: -item[1]):
            stages.append(WatchedStage(f"{shown}.{stage}", seconds / steps, seconds / whole))
    return stages
