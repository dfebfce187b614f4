"""Where the microseconds of a round go, read from the three services' own traces.

    python -m benchmarks.round_profile [--tokens 1000] [--gamma 4] [--target DIR]

One text after another on an otherwise idle machine, so that all that is not a model's pass is
on the critical path. The services run on one machine and stamp with one clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.measure.environment import RESULTS, describe
from benchmarks.measure.services import serving
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.telemetry.stages import STEP_STAGES, span_of
from tandem.tools.local.pair import Pair, embedded

_NEW_TOKENS = 250
_SERVICES = ("drafter", "target", "orchestrator")
# Rounds of the first texts warm caches and allocators.
_WARM_UP = 50


@dataclass(frozen=True)
class Span:
    """What is needed of a recorded span; times in nanoseconds of the machine's clock."""

    name: str
    parent: str
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """End less start."""
        return self.end_ns - self.start_ns


def read_spans(path: Path) -> Iterator[tuple[str, Span]]:
    """Spans of a file of OTLP-JSON lines, with their ids."""
    for line in path.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    start, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
                    yield (
                        span["spanId"],
                        Span(span["name"], span.get("parentSpanId", ""), start, end),
                    )


def segments(spans: dict[str, Span]) -> dict[str, list[float]]:
    """Microseconds of each segment of a round's critical path, a value a drafted round."""
    below: dict[str, list[tuple[str, Span]]] = {}
    for span_id, span in spans.items():
        below.setdefault(span.parent, []).append((span_id, span))
    found: dict[str, list[float]] = {}
    rounds = [(i, s) for i, s in spans.items() if s.name == "round"]
    for round_id, round_ in sorted(rounds, key=lambda item: item[1].start_ns)[_WARM_UP:]:
        steps = {
            step.name: (step_id, step)
            for call_id, _ in below.get(round_id, ())
            for step_id, step in below.get(call_id, ())
        }
        if "draft" not in steps:
            continue
        (draft_id, draft), (verify_id, verify) = steps["draft"], steps["verify"]
        parts = {
            "orchestrator, to the drafter": draft.start_ns - round_.start_ns,
            **_stages(draft, below.get(draft_id, ())),
            "back, and on to the target": verify.start_ns - draft.end_ns,
            **_stages(verify, below.get(verify_id, ())),
            "back, and the text": round_.end_ns - verify.end_ns,
            "whole round": round_.duration_ns,
        }
        for name, nanoseconds in parts.items():
            found.setdefault(name, []).append(nanoseconds / 1e3)
    return found


def _stages(step: Span, stages: Iterable[tuple[str, Span]]) -> dict[str, int]:
    """Nanoseconds of each stage of a step, and of what is in none."""
    spent = {span_of(step.name, stage): 0 for stage in STEP_STAGES}
    for _, span in stages:
        spent[span.name] += span.duration_ns
    return {**spent, f"{step.name}: the rest": step.duration_ns - sum(spent.values())}


def record(folder: Path, pair: Pair, tokens: int, gamma: int) -> dict[str, Span]:
    """Run texts one after another; all spans that the three services wrote."""
    files = {name: folder / f"{name}.jsonl" for name in _SERVICES}
    with (
        serving(pair, **files) as stack,
        grpc.insecure_channel(stack.addresses["orchestrator"]) as channel,
    ):
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        for seed in range(-(-tokens // _NEW_TOKENS)):
            message = pb.Generation(
                prompt="def ",
                stopping=pb.Stopping(max_new_tokens=_NEW_TOKENS, ignore_eos=True),
                speculation=pb.Speculation(gamma=gamma),
            )
            message.sampling.seed = seed
            for _ in stub.Generate(pb.GenerateRequest(generation=message)):
                pass
    return {span_id: span for path in files.values() for span_id, span in read_spans(path)}


def main() -> None:
    """Measure, print and write benchmarks/results/round_profile-TARGET.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens to generate")
    parser.add_argument("--gamma", type=int, default=4, help="draft length")
    parser.add_argument("--target", help="checkpoint; the embedded target by default")
    parser.add_argument("--dtype", help="of the target, and of the drafter if it has no other")
    parser.add_argument("--drafter-dtype", help="of the drafter")
    arguments = parser.parse_args()
    pair = Pair(
        target=arguments.target or embedded("target"),
        drafter=embedded("drafter"),
        dtype=arguments.dtype,
        drafter_dtype=arguments.drafter_dtype,
    )
    with tempfile.TemporaryDirectory() as folder:
        found = segments(record(Path(folder), pair, arguments.tokens, arguments.gamma))
    table = Table("part of a round", "p50, microseconds", "share of the medians")
    medians = {name: median(values) for name, values in found.items()}
    total = sum(value for name, value in medians.items() if name != "whole round")
    for name, value in medians.items():
        table.add_row(name, f"{value:,.0f}", f"{value / total:.0%}")
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    name = Path(arguments.target).name if arguments.target else "embedded"
    result = {
        "environment": describe(),
        "target": name,
        "dtype": arguments.dtype,
        "drafter_dtype": arguments.drafter_dtype,
        "gamma": arguments.gamma,
        "rounds": len(found["whole round"]),
        "p50_microseconds": {name: round(value, 1) for name, value in medians.items()},
    }
    (RESULTS / f"round_profile-{name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
