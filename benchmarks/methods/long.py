"""A target that drafts over few keys of a long text (TriForce), beside plain decoding, in turn.

    python -m benchmarks.methods.long [--contexts 500 2000 7000] [--budget 512] [--turns 5]

The target is the embedded one with the adapter of `models.zoo.long`, which knows long texts. First,
in this process and by torch: what a pass of one row takes, over all keys and over few; and how much
their rows overlap after held-out text, for chunks and for a window of as many keys. Then services:
tokens a second after prompts of held-out text, of plain decoding, of drafts over chunks, and of a
cascade in which the text's own phrases are reviewed over chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked
from models import corpus
from models.loop import Stage, windows
from models.zoo.training.texts import tokenizer_of
from tandem.inference.decoder import Decoder, DecoderOptions
from tandem.inference.feed import Feed
from tandem.inference.kv.sparse_keys import SparseKeys
from tandem.inference.loading.checkpoint import CheckpointSource, read_checkpoint
from tandem.inference.views.few_keys import SparseView
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.tools.local.pair import Pair, embedded

ADAPTER, GAMMA, NEW_TOKENS = "models/long", 4, 96
# Rows of a text whose overlap is measured, and passes that are timed.
_ROWS, _PASSES = 48, 30


def texts_of(count: int, length: int) -> list[list[int]]:
    """Windows of held-out text."""
    found = [text for name, text in corpus.sources() if corpus.held_out(name)]
    stream = corpus.encode(tokenizer_of(Path("models")), found)
    whole = Stage("held out", steps=1, rows=count, length=length - 1, start=0, end=0)
    return [row.tolist() for row in windows(stream, whole, 0)]


def passes_at(decoder: Decoder, view: SparseView, text: list[int]) -> dict[str, float]:
    """Milliseconds of a pass of a row after a text, over all keys and over few, in turn."""
    cache, own = decoder.reserve(len(text) + 8), view.reserve(len(text) + 8)
    assert cache is not None
    assert own is not None
    spent: dict[str, list[float]] = {"all keys": [], "few keys": []}
    decoder.forward([Feed(cache, text[:-1], 0)])
    own.show(cache)
    view.forward([Feed(own, text[-1:], 1)])
    for _ in range(1 + _PASSES):
        for name, model, of, length in (
            ("all keys", decoder, cache, len(text) - 1),
            ("few keys", view, own, len(text)),
        ):
            since = time.perf_counter()
            model.forward([Feed(of, text[-1:], 1)])
            spent[name].append(1e3 * (time.perf_counter() - since))
            of.rollback(length)
    decoder.release(cache)
    view.release(own)
    medians = {f"{name} ms": statistics.median(times[1:]) for name, times in spent.items()}
    medians["few/all"] = medians["few keys ms"] / medians["all keys ms"]
    return medians


def overlaps_at(decoder: Decoder, view: SparseView, text: list[int]) -> list[float]:
    """Of rows over few keys with those over all, along a text, whose keys are chosen once."""
    cache, own = decoder.reserve(len(text)), view.reserve(len(text))
    assert cache is not None
    assert own is not None
    first = len(text) - _ROWS
    decoder.forward([Feed(cache, text[: first - 1], 0)])
    own.show(cache)
    view.forward([Feed(own, [text[first - 1]], 1)])  # a row of the decoder's own
    few = [view.forward([Feed(own, [token_id], 1)]).logits for token_id in text[first:-1]]
    everything = decoder.forward([Feed(cache, text[first - 1 : -1], _ROWS)]).logits
    decoder.release(cache)
    view.release(own)
    p, q = everything[1:].float().softmax(-1), torch.cat(few).float().softmax(-1)
    return [float(one) for one in torch.minimum(p, q).sum(-1)]


def at_contexts(options: argparse.Namespace, progress: Progress) -> list[dict[str, Any]]:
    """Passes and overlaps, context by context."""
    source = CheckpointSource(embedded("target"), adapter=ADAPTER)
    most = max(options.contexts) + 512
    decoder = Decoder(
        read_checkpoint(source), DecoderOptions(cache_tokens=most, engine="torch", longest=most)
    )
    keys = {
        "chunks": SparseKeys("chunks", budget=options.budget, recent=options.recent),
        "window": SparseKeys("window", budget=options.budget),
    }
    views = {name: SparseView(decoder, own, 1) for name, own in keys.items()}
    lines = []
    with torch.inference_mode():
        for context in progress.track(options.contexts, description="contexts"):
            texts = texts_of(options.texts, context + _ROWS)
            line: dict[str, Any] = {"context": context}
            line |= passes_at(decoder, views["chunks"], texts[0][:context])
            for name, view in views.items():
                each = [np.mean(overlaps_at(decoder, view, text)) for text in texts]
                error = np.std(each, ddof=1) / len(each) ** 0.5
                line[f"overlap, {name}"] = f"{np.mean(each):.3f} ± {error:.3f}"
            lines.append(line)
    return lines


def _recipe(folder: Path, method: str, budget: int, recent: int) -> str:
    """The path of a recipe's file."""
    part = "reviewer." if method == "cascade" else ""
    path = folder / f"{method}.toml"
    path.write_text(
        f'method = "{method}"\n{part}model = "@target"\n'
        f'{part}kv = {{kind = "chunks", budget = {budget}, recent = {recent}}}\n'
    )
    return str(path)


async def speeds(
    addresses: dict[str, str], options: argparse.Namespace, progress: Progress
) -> list[dict[str, Any]]:
    """Tokens a second after each context, of each way; and the ratios to plain decoding."""
    lines = []
    ways = [("plain", "model", 0), ("chunks", "model", GAMMA), ("cascade", "cascade", GAMMA)]
    for context in options.contexts:
        prompts = texts_of(2, context)
        for temperature in (0.0, 1.0):
            found: dict[str, list[float]] = {name: [] for name, _, _ in ways}
            tokens: dict[str, float] = {}
            label = f"{context}, temperature {temperature:g}"
            for _ in progress.track(range(options.turns + 1), description=label):
                for name, of, gamma in ways:
                    spent, rounds, new = 0.0, 0, 0
                    for seed, prompt in enumerate(prompts):
                        one = await _text(addresses[of], seed, prompt, temperature, gamma)
                        spent, rounds, new = spent + one[0], rounds + one[1], new + one[2]
                    found[name].append(new / spent)
                    tokens[name] = new / rounds
            own = {name: each[1:] for name, each in found.items()}
            line: dict[str, Any] = {"context": context, "temperature": temperature}
            line |= {name: statistics.median(each) for name, each in own.items()}
            for name in ("chunks", "cascade"):
                ratios = [a / b for a, b in zip(own[name], own["plain"], strict=True)]
                line[f"{name}/plain"] = statistics.median(ratios)
                line[f"{name}/plain, range"] = f"{min(ratios):.2f}-{max(ratios):.2f}"
                line[f"{name}, tokens a round"] = tokens[name]
            lines.append(line)
    return lines


async def _text(
    address: str, seed: int, prompt: list[int], temperature: float, gamma: int
) -> tuple[float, int, int]:
    """Seconds after the first token, rounds, and tokens in them."""
    request = asked(seed, NEW_TOKENS, temperature, prompt, gamma=gamma, verifier="block")
    async with grpc.aio.insecure_channel(address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        since = 0.0
        async for event in stub.Generate(pb.GenerateRequest(generation=request)):
            since = since or time.perf_counter()
            if event.HasField("summary"):
                summary = event.summary
        return time.perf_counter() - since, summary.rounds, summary.new_tokens - 1


def main() -> None:
    """Measure, print and write benchmarks/results/long.json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods.long", description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=(500, 2000, 7000))
    parser.add_argument("--budget", type=int, default=512, help="keys that are seen")
    parser.add_argument("--recent", type=int, default=0, help="latest ones; 0: three quarters")
    parser.add_argument("--texts", type=int, default=8, help="of an overlap")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    console = Console(width=150)
    with Progress(console=console) as progress, ExitStack() as running:
        passes = at_contexts(options, progress)
        progress.console.print(table_of(passes))
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        addresses = {}
        for method in ("model", "cascade"):
            pair = Pair(recipe=_recipe(folder, method, options.budget, options.recent), inside=True)
            # Room for all prompts, which are then computed once.
            room = 4 * sum(options.contexts) + 4096
            own = {"ENGINE": "torch", "ADAPTER": ADAPTER, "CACHE_TOKENS": str(room)}
            own["MAX_SEQUENCES"] = "2"
            stack = running.enter_context(serving(pair, {"target": own}))
            addresses[method] = stack.addresses["orchestrator"]
        lines = asyncio.run(speeds(addresses, options, progress))
    console.print(table_of(lines))
    told = {
        "budget": options.budget,
        "recent": options.recent,
        "gamma": GAMMA,
        "new_tokens": NEW_TOKENS,
    }
    keep(RESULTS / "long.json", **told, passes=passes, lines=lines)


if __name__ == "__main__":
    main()
