"""A target that drafts with its own first layers, beside the same with a copy of them, in turn.

    python -m benchmarks.methods.views [--engine torch] [--turns 7] [--exit 3]

The target is the embedded one with LayerSkip's adapter, expanded to 90 M parameters in twelve
layers, so that layers cost something. First its passes, in this process, of 1, 4 and 16 texts: of
the whole with five rows a text, the same where four of them came out of the exit, of the exit with
one row, and of the whole with one row.
Then services: tokens a second of plain decoding, of the view, of a copy in the target's dtype and
of one in the drafter's own (bfloat16 where that is faster), at temperature 1 by `block` and at
temperature 0, with drafts of 4 tokens; and what the target's process holds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.expand import Shape, expand
from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked
from benchmarks.measure.vitals import vitals_of
from tandem.inference.decoder import Decoder, DecoderOptions
from tandem.inference.feed import Feed, Resumed
from tandem.inference.kv.viewed import ViewedCache
from tandem.inference.loading.checkpoint import CheckpointSource, read_checkpoint
from tandem.inference.loading.partial import ModelPart
from tandem.inference.views.part import ModelView
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.tools.local.pair import Pair, embedded
from tandem.tools.local.stack import Stack

GAMMA, NEW_TOKENS, TEXTS, CONTEXT = 4, 96, 2, 128
SHAPE = Shape(layers=12, width=768, heads=12, kv_heads=12, mlp=2176)
_ADAPTER = "models/layerskip"
SEQUENCES = (1, 4, 16)
# Of each kind in a turn.
_PASSES = 8


def target_in(folder: Path) -> Path:
    """The folder of the expanded target, made if it is not there."""
    found = folder / "target"
    if not (found / "config.json").exists():
        own = folder / "adapted"
        source = CheckpointSource(embedded("target"), adapter=_ADAPTER)
        loaded = read_checkpoint(source)
        loaded.model.save_pretrained(own)
        loaded.about.tokenizer.save_pretrained(own)
        expand(own, SHAPE, found)
    return found


def passes_of(target: Path, engine: Any, exit_: int, turns: int) -> list[dict[str, float]]:
    """Milliseconds of passes for one text and for several, medians of many in turn; and ratios to
    the whole pass."""
    part = ModelPart(exit=exit_)
    options = DecoderOptions(cache_tokens=4096, engine=engine, views=(part,))
    decoder = Decoder(read_checkpoint(CheckpointSource(str(target))), options)
    view = ModelView(decoder, part)
    lines = []
    for count in SEQUENCES:
        with torch.inference_mode():
            spent = _passes_of(decoder, view, count, turns)
        medians = {name: 1e3 * statistics.median(times) for name, times in spent.items()}
        lines.append(
            {
                "texts": count,
                **{f"{name} ms": value for name, value in medians.items()},
                "resumed/whole": medians["resumed"] / medians["whole"],
                "exit/whole": medians["exit"] / medians["whole"],
            }
        )
    return lines


def _passes_of(decoder: Decoder, view: ModelView, count: int, turns: int) -> dict[str, list[float]]:
    """Seconds of each kind of pass, of so many texts."""
    caches = [decoder.reserve(CONTEXT + GAMMA + 1) for _ in range(count)]
    own, shown = [cache for cache in caches if cache], [ViewedCache() for _ in caches]
    assert len(own) == count
    tokens = list(range(GAMMA + 1))
    for cache, view_of in zip(own, shown, strict=True):
        decoder.forward([Feed(cache, [i % 500 for i in range(CONTEXT)], 0)])
        view_of.show(cache)
    for token_id in tokens[:-1]:
        view.forward([Feed(each, [token_id], 1) for each in shown])
    known = [
        Resumed(view.part.exit, each.exit_states).first(GAMMA) if each.exit_states else None
        for each in shown
    ]

    def whole(resumed: Sequence[Resumed | None], rows: int = GAMMA + 1) -> None:
        decoder.forward(
            [
                Feed(cache, tokens[:rows], rows, resumed=each)
                for cache, each in zip(own, resumed, strict=True)
            ]
        )
        for cache in own:
            cache.rollback(CONTEXT)

    def part_alone() -> None:
        for each in shown:
            each.keep(())
        view.forward([Feed(each, tokens[:1], 1) for each in shown])

    nothing = [None] * count
    works: dict[str, Callable[[], None]] = {
        "whole": lambda: whole(nothing),
        "resumed": lambda: whole(known),
        "exit": part_alone,
        "one row": lambda: whole(nothing, 1),
    }
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(1 + turns * _PASSES):
        for name, work in works.items():
            since = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - since)
    for cache in own:
        decoder.release(cache)
    return {name: times[1:] for name, times in found.items()}


async def speeds(
    stacks: Mapping[str, Stack], turns: int, progress: Progress
) -> list[dict[str, Any]]:
    """Tokens a second at both temperatures: of each stack, and their ratios."""
    lines = []
    async with AsyncExitStack() as channels:
        stubs: dict[str, Any] = {}
        for name, stack in stacks.items():
            channel = grpc.aio.insecure_channel(stack.addresses["orchestrator"])
            await channels.enter_async_context(channel)
            stubs[name] = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)

        async def texts(name: str, gamma: int, temperature: float) -> tuple[float, pb.Summary]:
            since = time.perf_counter()
            for seed in range(TEXTS):
                request = asked(seed, NEW_TOKENS, temperature, gamma=gamma, verifier="block")
                reply = await stubs[name].Complete(pb.CompleteRequest(generation=request))
            return TEXTS * NEW_TOKENS / (time.perf_counter() - since), reply.summary

        ways = [("plain", "view", 0), *((name, name, GAMMA) for name in stacks)]
        for temperature in (0.0, 1.0):
            found: dict[str, list[float]] = {name: [] for name, _, _ in ways}
            for _ in progress.track(range(turns + 1), description=f"temperature {temperature:g}"):
                for name, of, gamma in ways:
                    speed, summary = await texts(of, gamma, temperature)
                    found[name].append(speed)
            own = {name: each[1:] for name, each in found.items()}
            line: dict[str, Any] = {
                "temperature": temperature,
                **{name: statistics.median(each) for name, each in own.items()},
                "tokens a round": (summary.new_tokens - 1) / summary.rounds,
            }
            for name in own:
                if name != "view":
                    ratios = [a / b for a, b in zip(own["view"], own[name], strict=True)]
                    line[f"view/{name}"] = statistics.median(ratios)
                    line[f"view/{name}, range"] = f"{min(ratios):.2f}-{max(ratios):.2f}"
            lines.append(line)
    return lines


def main() -> None:
    """Measure, print and write benchmarks/results/views-ENGINE.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods.views", description=__doc__)
    parser.add_argument("--exit", type=int, default=3, help="layers of the part")
    parser.add_argument("--engine", choices=("auto", "torch", "openvino"), default="torch")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--cache", type=Path, default=Path(".cache/views"))
    options = parser.parse_args()
    target = target_in(options.cache)
    console = Console(width=120)
    engine = "torch" if options.engine == "auto" else options.engine
    passes = passes_of(target, engine, options.exit, options.turns)
    console.print(table_of(passes))
    own = {"ENGINE": options.engine}
    held, lines = {}, []
    with Progress(console=console) as progress, ExitStack() as running:
        stacks = {}
        for name, drafter, dtype in (
            ("view", "@target", "auto"),
            ("copy", str(target), "float32"),
            ("copy, own dtype", str(target), "auto"),
            ("alone", "none", "float32"),
        ):
            pair = Pair(target=str(target), drafter=drafter, inside=drafter != "none")
            more = {"drafter": {"EXIT": str(options.exit), "DTYPE": dtype}, "target": own}
            if drafter == "none":
                more.pop("drafter")
            stack = running.enter_context(serving(pair, more))
            held[name] = vitals_of(stack.processes["target"].id).anonymous_bytes / 1e6
            if name != "alone":
                stacks[name] = stack
        lines = asyncio.run(speeds(stacks, options.turns, progress))
    console.print(table_of(lines))
    console.print(f"anonymous memory of the target's process, MB: {held}")
    told = {"exit": options.exit, "layers": SHAPE.layers, "engine": options.engine}
    keep(
        RESULTS / f"views-{options.engine}.json",
        gamma=GAMMA,
        **told,
        passes=passes,
        held_mb=held,
        lines=lines,
    )


if __name__ == "__main__":
    main()
