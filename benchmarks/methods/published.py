"""Drafts for a published model (SmolLM2-135M-Instruct) that has no small model of its family here.

    python -m benchmarks.methods.published [--drafter DIR] [--exits 10 20] [--skip FILE]

Plain decoding, lookup, a drafter of the user's own (of `tandem distill`), the model's first layers,
and what is left of it without some sublayers (of `models.zoo.skip_search`), one text at a time and
in turn, at temperature 0 and 1. Each with drafts of 4 tokens, and with lengths that the services
choose. The texts are answers in chats. Writes benchmarks/results/published-drafts.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import Progress

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked
from benchmarks.published import chats
from models import published
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack

GAMMA, NEW_TOKENS, MAX_LENGTH = 4, 96, 1024
# Chats of a turn. The first way to ask for one must not pay for the others.
_TEXTS, _COLD = 2, {"PREFIX_CACHE": "false"}


@dataclass
class Measured:
    """A way to draft, at one temperature.

    Attributes:
        way: its name.
        gamma: tokens of a draft; None where the services choose.
        temperature: of the texts.
        speeds: tokens a second of each turn.
        emitted: tokens of all rounds, and their number.
        drafted: tokens drafted, and accepted.
    """

    way: str
    gamma: int | None
    temperature: float
    speeds: list[float] = field(default_factory=list)
    emitted: list[int] = field(default_factory=lambda: [0, 0])
    drafted: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, seconds: float, texts: list[pb.Summary]) -> None:
        """A turn."""
        self.speeds.append(sum(text.new_tokens for text in texts) / seconds)
        for text in texts:
            self.emitted[0] += text.new_tokens - 1
            self.emitted[1] += text.rounds - 1
            self.drafted[0] += text.drafted_tokens
            self.drafted[1] += text.accepted_tokens

    def row(self, plain: Measured) -> dict[str, object]:
        """Of the table, beside plain decoding in the same turns."""
        ratios = [own / other for own, other in zip(self.speeds, plain.speeds, strict=True)]
        drafted, accepted = self.drafted
        return {
            "temperature": self.temperature,
            "way": self.way,
            "draft": "chosen" if self.gamma is None else self.gamma,
            "accepted": accepted / drafted if drafted else None,
            "tokens a round": self.emitted[0] / self.emitted[1],
            "tokens/s": statistics.median(self.speeds),
            "over plain": statistics.median(ratios),
            "range": f"{min(ratios):.2f} to {max(ratios):.2f}",
        }


def pairs_of(options: argparse.Namespace) -> Iterator[tuple[str, Pair, Mapping[str, str]]]:
    """Ways to draft: name, models, and settings of what drafts."""
    own: dict[str, Any] = {"target": str(published.FOLDER), "dtype": options.dtype}
    own |= {"max_length": MAX_LENGTH, "inside": True}
    yield "lookup", Pair(**own, recipe="lookup"), {}
    if options.drafter is not None:
        yield "drafter", Pair(**own, drafter=str(options.drafter)), {}
    for layers in options.exits:
        yield f"first {layers} layers", Pair(**own, drafter="@target"), {"EXIT": str(layers)}
    if options.skip is not None:
        yield "sublayers left out", Pair(**own, drafter="@target"), {"SKIP": str(options.skip)}


def measured(
    stacks: Mapping[str, Stack], turns: int, progress: Progress
) -> Iterator[list[Measured]]:
    """All ways in turn, a temperature at a time; plain decoding first, by the first stack."""
    prompts = chats()
    stubs: dict[str, Any] = {}
    with ExitStack() as channels:
        for name, stack in stacks.items():
            channel = grpc.insecure_channel(stack.addresses["orchestrator"])
            stubs[name] = orchestrator_pb2_grpc.OrchestratorServiceStub(
                channels.enter_context(channel)
            )
        for temperature in (0.0, 1.0):
            first = next(iter(stubs))
            plain = first, Measured("plain", 0, temperature)
            drafted = [
                (name, Measured(name, gamma, temperature))
                for name in stubs
                for gamma in (GAMMA, None)
            ]
            for turn in progress.track(
                range(-1, turns), description=f"temperature {temperature:g}"
            ):
                for name, one in (plain, *drafted):
                    length = {} if one.gamma is None else {"gamma": one.gamma}
                    since, texts = time.perf_counter(), []
                    for text in range(_TEXTS):
                        number = max(turn, 0) * _TEXTS + text
                        prompt = prompts[number % len(prompts)]
                        request = asked(number, NEW_TOKENS, temperature, prompt, **length)
                        reply = stubs[name].Complete(pb.CompleteRequest(generation=request))
                        texts.append(reply.summary)
                    if turn >= 0:  # the first warms up
                        one.add(time.perf_counter() - since, texts)
            yield [one for _, one in (plain, *drafted)]


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.methods.published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--drafter", type=Path, help="folder of a drafter of its tokenizer")
    parser.add_argument("--exits", type=int, nargs="*", default=(), help="first layers that draft")
    parser.add_argument("--skip", type=Path, help="file of sublayers to leave out")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULTS / "published-drafts.json")
    options = parser.parse_args()
    try:
        published.prepare()
    except OSError as error:
        sys.exit(str(error))
    console, found = Console(width=140), []
    with Progress(console=console) as progress, ExitStack() as running:
        stacks = {}
        for name, pair, more in pairs_of(options):
            stacks[name] = running.enter_context(
                serving(pair, {"drafter": {**_COLD, **more}, "target": _COLD})
            )
        for ways in measured(stacks, options.turns, progress):
            console.print(table_of(one.row(ways[0]) for one in ways))
            found += ways
    keep(options.output, dtype=options.dtype, ways=[asdict(one) for one in found])


if __name__ == "__main__":
    main()
