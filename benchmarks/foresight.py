"""`tandem trace what-if` beside what is then measured: other draft lengths, the other rule.

    python -m benchmarks.foresight [--turns 40] [--temperature 1]

Every way writes the same prompts, text by text in turn, on one stack whose spans are recorded. What
one way's recording foretells of the others is held to their own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measure.environment import RESULTS, describe
from benchmarks.measure.services import serving
from tandem.tools.load.client import Client, sampled
from tandem.tools.load.method import Method
from tandem.tools.load.requests import PROMPTS
from tandem.tools.local.pair import Pair
from tandem.tools.traces.prediction.basis import Basis
from tandem.tools.traces.prediction.whatif import Outlook
from tandem.tools.traces.read.recording import Recording

WAYS = (Method("block", 4), Method("block", 2), Method("block", 8), Method("token", 4))
_SERVICES = ("drafter", "target", "orchestrator")
_NEW_TOKENS = 96


@dataclass(frozen=True)
class Foretold:
    """A speed that one recording foretells and another one has.

    Attributes:
        source: the recording's way.
        way: the other one.
        foretold: tokens/s of a request.
        measured: the same.
        error: relative.
    """

    source: str
    way: str
    foretold: float
    measured: float
    error: float


def name_of(way: Method) -> str:
    """For people and files."""
    return f"{way.verifier}-{way.gamma}"


def record(folder: Path, turns: int, temperature: float) -> dict[str, Path]:
    """Write texts in turn; each way's spans in a file of its own."""
    files = {name: folder / f"{name}.jsonl" for name in _SERVICES}
    ways: dict[str, str] = {}
    with serving(Pair(), **files) as stack, Client(stack.addresses["orchestrator"]) as client:
        for turn in range(-1, turns):  # the first one warms up
            for place in range(len(WAYS)):
                way = WAYS[(turn + place) % len(WAYS)]
                prompt = PROMPTS[turn % len(PROMPTS)]
                metadata = sampled(turn >= 0)
                asked = way.request(prompt, temperature, max(turn, 0), _NEW_TOKENS)
                for _ in client.generate(asked, metadata=metadata):
                    pass
                ways[metadata[0][1].split("-")[1]] = name_of(way)
    found = {name_of(way): folder / f"way-{name_of(way)}.jsonl" for way in WAYS}
    lines: dict[str, list[str]] = {name: [] for name in found}
    for path in files.values():
        for trace_id, line in spans_of(path):
            if trace_id in ways:
                lines[ways[trace_id]].append(line)
    for name, path in found.items():
        path.write_text("\n".join(lines[name]) + "\n")
    return found


def spans_of(path: Path) -> Iterator[tuple[str, str]]:
    """Trace and line of each span of a file, one a line."""
    for line in path.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    alone = {**scope, "spans": [span]}
                    alone = {"resourceSpans": [{**resource, "scopeSpans": [alone]}]}
                    yield span["traceId"], json.dumps(alone)


def foretell(files: dict[str, Path]) -> list[Foretold]:
    """What each way's recording says of the others, and what theirs say."""
    outlooks = {
        name: Outlook(Basis(Recording([str(path)]), None, None)) for name, path in files.items()
    }
    found = []
    for source, outlook in outlooks.items():
        for row in outlook.gammas:
            way = f"{row.verifier}-{row.gamma}"
            if way in outlooks and way != source:
                measured = outlooks[way].tokens_per_s
                error = row.tokens_per_s / measured - 1
                found.append(Foretold(source, way, row.tokens_per_s, measured, error))
    return found


def main() -> None:
    """Record, foretell, print, and write benchmarks/results/foresight.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40, help="texts of each way")
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = foretell(record(Path(folder), options.turns, options.temperature))
    table = Table("recorded", "asked of", "foretold, tokens/s", "measured", "error")
    for one in found:
        speeds = (f"{one.foretold:.1f}", f"{one.measured:.1f}")
        table.add_row(one.source, one.way, *speeds, f"{one.error:+.1%}")
    Console().print(table)
    result = {
        "environment": describe(),
        "turns": options.turns,
        "temperature": options.temperature,
        "new_tokens": _NEW_TOKENS,
        "foretold": [asdict(one) for one in found],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "foresight.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
