"""Targets whose layers overlap in rounds without a draft (PPD, SPEED).

    python -m benchmarks.methods.overlap [--turns 5]

1. How often the guess of an exit is right, by exit and number of guesses: the embedded target, and
   the same with LayerSkip's adapter. And the rows of the last cycles of `models/speed` that were of
   use in a pass, of as many as there are cycles.
2. The time of a token on two simulated devices, one for the lower layers and one for the upper:
   real rounds of one text, where a layer takes as long as is said, beside the time by the rate
   of right guesses: h max(lower, upper) + (1 - h)(lower + upper).
3. Tokens a second of services in turn, over those of the same target without OVERLAP: the target
   with LayerSkip's adapter, expanded to 90 M parameters in twelve layers, by one and by two
   pipelines; and `models/speed`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import torch
from rich.console import Console
from rich.progress import Progress, track
from torch import Tensor

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked
from benchmarks.methods.views import target_in
from tandem.engine.asks import Steps, Take
from tandem.engine.job import Job
from tandem.engine.stepper import Stepper
from tandem.inference.decoder import Decoder, DecoderOptions
from tandem.inference.loading.checkpoint import CheckpointSource, read_checkpoint
from tandem.inference.passes.overlapped import ONE_PIPELINE, Pipelines
from tandem.inference.views.overlapped import OverlappedDecoder
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tandem.tools.local.pair import Pair, embedded
from tandem.tools.local.stack import Stack
from tandem.verification import VERIFIERS
from target_svc.overlap import Overlap
from target_svc.round import TargetRequest, TargetSequence, open_
from target_svc.run import Credit, run

GUESSES = (1, 2, 4)
TEXTS, NEW_TOKENS = 8, 120
# Of a layer of the simulated devices: the model that computes the rows takes a small part of it.
_LAYER_SECONDS = 0.01
_PROMPTS = ("import ", "class Queue:\n", "def read(self, size):\n", "if __name__ == ")
TEMPERATURES = (0.0, 1.0)
_SPEED = "models/speed"
# Of the expanded target.
_EXIT = 3
_SERVED_TOKENS = 96


class Simulated:
    """Two devices, on which a group of layers takes as long as it has layers.

    Args:
        layers: of each group.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._seconds = [_LAYER_SECONDS * each for each in layers]

    def run(self, works: Mapping[int, Callable[[], Tensor]]) -> list[Tensor]:
        """See `Pipelines`."""
        ends = time.perf_counter() + max(self._seconds[group] for group in works)
        found = [work() for work in works.values()]
        time.sleep(max(ends - time.perf_counter(), 0.0))
        return found


def decoder_of(model: str, adapter: str = "") -> Decoder:
    """A target in this process."""
    checkpoint = read_checkpoint(CheckpointSource(model, adapter=adapter))
    return Decoder(checkpoint, DecoderOptions(cache_tokens=16_384, engine="torch"))


class Counted:
    """Counts what rounds of a text take.

    Attributes:
        right: rounds whose next token was among the guesses.
        guessed: rounds in which it was guessed.
        rounds: all but the first of each text, which begins without a guess.
        passes: of these.
        seconds: of these.
    """

    def __init__(self) -> None:
        self.right = self.guessed = self.rounds = self.passes = 0
        self.seconds = 0.0

    @property
    def rate(self) -> float:
        """Of right guesses."""
        return self.right / self.guessed


@torch.inference_mode()
def played(
    decoder: Decoder,
    exit_: int,
    guesses: int,
    temperature: float,
    texts: int,
    pipelines: Pipelines = ONE_PIPELINE,
) -> Counted:
    """Texts, one at a time."""
    counted = Counted()
    scorer = OverlappedDecoder(decoder, exit_, guesses, pipelines)

    def count(right: bool) -> None:
        counted.right += right
        counted.guessed += 1

    overlap = Overlap(scorer, scorer.groups, scorer.exit, guesses, count)
    for seed in range(texts):
        prompt = decoder.about.tokenizer.encode(_PROMPTS[seed % len(_PROMPTS)])
        sampling = Sampling(temperature=temperature, seed=seed)
        request = TargetRequest(sampling, VERIFIERS["block"], end=len(prompt) + NEW_TOKENS + 2)
        sequence = TargetSequence(list(prompt), request)
        sequence.caches = [decoder.reserve(request.end + guesses)]
        _finish(Job(sequence, open_(decoder, sequence, 0)))
        _finish(Job(sequence, _rounds(decoder, sequence, overlap, 1)))
        counted.rounds += NEW_TOKENS - 1
        before, since = decoder.forward_passes, time.perf_counter()
        _finish(Job(sequence, _rounds(decoder, sequence, overlap, NEW_TOKENS - 1)))
        counted.seconds += time.perf_counter() - since
        counted.passes += decoder.forward_passes - before
        decoder.release(sequence.caches[0])
    return counted


def _rounds(scorer: Any, sequence: TargetSequence, overlap: Overlap, count: int) -> Steps[None]:
    credit = Credit(len(sequence.token_ids))
    credit.grant(count, DraftSize(0))
    return run(scorer, sequence, credit, None, overlap)


def _finish(job: Job[Any]) -> None:
    stepper = Stepper(torch.device("cpu"))
    with closing(asyncio.new_event_loop()) as loop:
        job.done = loop.create_future()  # that nobody cancels
    job.resume()
    while not job.over:
        if isinstance(job.ask, Take):
            job.chunk = job.ask.left
        stepper.step([job])
    if job.error is not None:
        raise job.error


def hits() -> Iterator[dict[str, Any]]:
    """Right guesses by model, exit, guesses and temperature."""
    for name, adapter in (("embedded", ""), ("with LayerSkip's adapter", "models/layerskip")):
        decoder = decoder_of(embedded("target"), adapter)
        for exit_ in range(1, decoder.about.layers):
            for temperature in TEMPERATURES:
                found = {
                    f"{guesses} guessed": played(decoder, exit_, guesses, temperature, TEXTS).rate
                    for guesses in GUESSES
                }
                yield {"target": name, "exit": exit_, "temperature": temperature, **found}


def cycles() -> Iterator[dict[str, Any]]:
    """What the passes of a target of cycles are of use for."""
    decoder = decoder_of(_SPEED)
    groups = OverlappedDecoder(decoder, 0).groups
    for temperature in TEMPERATURES:
        found = played(decoder, 0, 1, temperature, TEXTS)
        yield {
            "temperature": temperature,
            "cycles": groups,
            "right guesses": found.rate,
            "passes a token": found.passes / found.rounds,
            "rows a pass": groups * found.rounds / found.passes,
        }


def simulated() -> Iterator[dict[str, Any]]:
    """The time of a token on two simulated devices."""
    decoder = decoder_of(embedded("target"), "models/layerskip")
    layers = decoder.about.layers
    for exit_ in range(1, layers):
        for guesses in (1, 4):
            upper_layers = layers - exit_
            groups = [min(exit_, upper_layers), max(exit_ - upper_layers, 0), upper_layers]
            devices = Simulated([each for each in groups if each])
            found = played(decoder, exit_, guesses, 1.0, 2, devices)
            lower, upper = (1e3 * _LAYER_SECONDS * each for each in (exit_, upper_layers))
            rate = found.rate
            expected = rate * max(lower, upper) + (1 - rate) * (lower + upper)
            took = 1e3 * found.seconds / (2 * (NEW_TOKENS - 1))
            yield {
                "lower ms": lower,
                "upper ms": upper,
                "guesses": guesses,
                "right": rate,
                "ms a token": took,
                "expected": expected,
                "ratio": took / expected,
            }


async def speeds(
    stacks: Mapping[str, tuple[str, Stack]], turns: int, progress: Progress
) -> list[dict[str, Any]]:
    """Tokens a second of each stack, and over the one without OVERLAP of its target."""
    lines = []
    async with AsyncExitStack() as channels:
        stubs: dict[str, Any] = {}
        for name, (_, stack) in stacks.items():
            channel = grpc.aio.insecure_channel(stack.addresses["orchestrator"])
            await channels.enter_async_context(channel)
            stubs[name] = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)

        async def text(name: str, temperature: float, seed: int) -> None:
            request = asked(seed, _SERVED_TOKENS, temperature, gamma=0)
            await stubs[name].Complete(pb.CompleteRequest(generation=request))

        for count in (1, 8):
            for temperature in TEMPERATURES:
                found: dict[str, list[float]] = {name: [] for name in stacks}
                what = f"{count} texts, temperature {temperature:g}"
                for _ in progress.track(range(turns + 1), description=what):
                    for name, speed in found.items():
                        since = time.perf_counter()
                        await asyncio.gather(*(text(name, temperature, i) for i in range(count)))
                        speed.append(count * _SERVED_TOKENS / (time.perf_counter() - since))
                for name, (base, _) in stacks.items():
                    own, plain = found[name][1:], found[base][1:]
                    ratios = [a / b for a, b in zip(own, plain, strict=True)]
                    lines.append(
                        {
                            "target": name,
                            "texts": count,
                            "temperature": temperature,
                            "tokens/s": statistics.median(own),
                            "over plain": statistics.median(ratios),
                            "range": f"{min(ratios):.2f}-{max(ratios):.2f}",
                        }
                    )
    return lines


def served(console: Console, turns: int, cache: Path) -> list[dict[str, Any]]:
    """See `speeds`."""
    large = str(target_in(cache))
    ways: dict[str, tuple[str, str, dict[str, str]]] = {
        "90 M": ("90 M", large, {}),
        "90 M, one pipeline": ("90 M", large, {"OVERLAP": str(_EXIT)}),
        "90 M, two pipelines": (
            "90 M",
            large,
            {"OVERLAP": str(_EXIT), "OVERLAP_PIPELINES": "2"},
        ),
        "speed": ("speed", _SPEED, {}),
        "speed, cycles": ("speed", _SPEED, {"OVERLAP": "cycles"}),
    }
    with Progress(console=console) as progress, ExitStack() as running:
        stacks = {}
        for name, (base, model, own) in ways.items():
            pair = Pair(target=model, drafter="none")
            more = {"target": {"ENGINE": "torch", **own}}
            stacks[name] = base, running.enter_context(serving(pair, more))
        return asyncio.run(speeds(stacks, turns, progress))


def main() -> None:
    """Measure, print and write benchmarks/results/overlap.json."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.methods.overlap", description=__doc__
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=Path(".cache/views"))
    options = parser.parse_args()
    console = Console(width=120)
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, lines in (("hits", hits()), ("cycles", cycles()), ("simulated", simulated())):
        found[name] = list(track(lines, description=name, console=console))
        console.print(table_of(found[name]))
    found["services"] = served(console, options.turns, options.cache)
    console.print(table_of(found["services"]))
    told = {"layer_ms": 1e3 * _LAYER_SECONDS, "exit": _EXIT}
    keep(RESULTS / "overlap.json", **told, **found)


if __name__ == "__main__":
    main()
