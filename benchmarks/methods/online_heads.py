"""What a head learns from its traffic: tokens a round before and after, on texts that it does not
learn from.

    python -m benchmarks.methods.online_heads [--head medusa] [--texts 300] [--minutes 4]
    python -m benchmarks.methods.online_heads [--head medusa] [--texts 150] --steps 100

The embedded target writes texts that continue C headers, as in `benchmarks.online`; a head that was
trained for it on Python drafts chains. Before and after, the same texts are written after headers
that no text came from, and at home, after held-out Python. With --steps there are no services: the
trainer takes that many steps, and what is measured is what the holdout measures.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from rich.console import Console

from benchmarks.measure.environment import RESULTS, ROOT, keep
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked, summaries
from benchmarks.online import Ids, cuts, headers, written
from models import corpus
from tandem.distillation.drafters import read_model, read_tokenizer
from tandem.drafter.v1 import learning_pb2, learning_pb2_grpc
from tandem.inference.heads.load import load_head
from tandem.inference.kv.size import Room
from tandem.inference.loading.checkpoint import CheckpointSource
from tandem.online.heads.home import head_home, told_texts
from tandem.online.heads.learner import HeadLearner
from tandem.online.learner import LENGTH, TEXTS
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.local.pair import Pair

_PROMPT, _NEW, _MEASURED, _SHORT = 64, 256, 48, 192
_AT_ONCE, _GAMMA = 4, 4


def texts_of(prompts: Ids, new: int, *, learn: bool) -> list[pb.Generation]:
    """Requests after prompts, drafted as chains."""
    found = []
    for number, prompt in enumerate(prompts):
        text = asked(number, new, prompt=prompt.tolist(), gamma=_GAMMA, max_nodes=_GAMMA)
        text.learn = learn
        found.append(text)
    return found


async def tokens_a_round(generator: LoadGenerator, prompts: Ids) -> tuple[float, float]:
    """Of rounds with a draft: the mean over texts, and its standard error."""
    texts = texts_of(prompts, _SHORT, learn=False)
    found = summaries(await generator.closed_loop(texts, _AT_ONCE))
    each = [one.block_efficiency for one in found]
    return float(np.mean(each)), float(np.std(each, ddof=1) / np.sqrt(len(each)))


async def measure(address: str, admin: str, prompts: dict[str, Ids], minutes: float) -> Any:
    """Tokens a round before and after, and what the drafter says at the end."""
    async with grpc.aio.insecure_channel(admin) as channel, LoadGenerator(address) as generator:
        stub: Any = learning_pb2_grpc.LearningServiceStub(channel)
        places = ("fresh", "home")
        before = {name: await tokens_a_round(generator, prompts[name]) for name in places}
        began = time.monotonic()
        await generator.closed_loop(texts_of(prompts["train"], _NEW, learn=True), _AT_ONCE)
        await asyncio.sleep(max(0.0, 60 * minutes - (time.monotonic() - began)))
        await stub.FreezeLearning(learning_pb2.FreezeLearningRequest(frozen=True))
        after = {name: await tokens_a_round(generator, prompts[name]) for name in places}
        return before, after, await stub.GetLearning(learning_pb2.GetLearningRequest())


def trained(name: str, prompts: dict[str, Ids], steps: int) -> dict[str, Any]:
    """Tokens of a chain that are accepted at temperature 1, before and after some steps."""
    torch.set_num_threads(1)
    path = str(ROOT / "models" / "target")
    target = read_model(path, torch.float32, torch.device("cpu"))
    places = range(_PROMPT - 1, _PROMPT + _SHORT - 1)
    source = CheckpointSource(str(ROOT / "models" / name), dtype="float32")
    head = load_head(source, name, path, Room(128, 128))
    told = {
        place: told_texts(target, written(target, own, seed), places, head.reads)
        for seed, (place, own) in enumerate(prompts.items())
    }
    with tempfile.TemporaryDirectory() as scratch:
        kept = Path(scratch) / "home.safetensors"
        home = head_home(path, "", LENGTH, kept, head.reads)
    learner, numbers = HeadLearner(head, head.trained(), home), np.random.default_rng(0)

    def figures() -> dict[str, tuple[float, float]]:
        found = {}
        for place in ("fresh", "home"):
            each = learner.measured(told[place]).overlap * head.learnt_depths
            found[place] = float(each.mean()), float(each.std(ddof=1) / np.sqrt(len(each)))
        return found

    before, began = figures(), time.process_time()
    for _ in range(steps):
        texts = numbers.integers(len(told["train"]), size=TEXTS)
        learner.step([told["train"][number] for number in texts], numbers)
    seconds = time.process_time() - began
    after = figures()
    return {"before": before, "after": after, "seconds": seconds, "forgotten": learner.at_home()}


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", choices=("medusa", "hydra", "eagle"), default="medusa")
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=30.0, help="of training a minute")
    parser.add_argument("--minutes", type=float, default=4.0, help="of learning")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=0, help="of a trainer without services")
    options = parser.parse_args()
    models = ROOT / "models"
    pair = Pair(str(models / "target"), str(models / options.head))
    tokenizer = read_tokenizer(str(models / "target"))
    train, other = headers()
    at_home = [text for name, text in corpus.sources() if corpus.held_out(name)]
    prompts = {
        "train": cuts(train, tokenizer, options.texts, _PROMPT, 1),
        "fresh": cuts(other, tokenizer, _MEASURED, _PROMPT, 2),
        "home": cuts(at_home, tokenizer, _MEASURED, _PROMPT, 2),
    }
    if options.steps:
        figures = trained(options.head, prompts, options.steps)
        Console().print(figures)
        keep(
            options.out / f"online-{options.head}-steps.json",
            texts=options.texts,
            steps=options.steps,
            **figures,
        )
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "state"
        drafter = {
            "METHOD": options.head,
            "TARGET": str(models / "target"),
            "ONLINE": str(options.seconds),
            "ONLINE_FOLDER": str(folder),
            "ADMIN_LISTEN": "127.0.0.1:0",
        }
        with serving(pair, {"drafter": drafter, "target": {"FEEDBACK": "last"}}) as stack:
            addresses = stack.addresses["orchestrator"], stack.further_addresses("ADMIN_LISTEN")
            found = measure(addresses[0], addresses[1]["drafter"], prompts, options.minutes)
            before, after, told = asyncio.run(found)
    rows = [
        {
            "texts": name,
            "before": f"{before[name][0]:.3f} ± {before[name][1]:.3f}",
            "after": f"{after[name][0]:.3f} ± {after[name][1]:.3f}",
        }
        for name in before
    ]
    console = Console()
    console.print(table_of(rows))
    console.print(told)
    keep(
        options.out / f"online-{options.head}.json",
        seconds_a_minute=options.seconds,
        minutes=options.minutes,
        texts=options.texts,
        tokens_a_round={"before": before, "after": after},
        weights_version=told.weights_version,
        kept_texts=told.kept_texts,
        held_bytes=told.held_bytes,
        steps=told.steps,
        turned_down=told.turned_down,
        overlap={"served": told.overlap.served, "trained": told.overlap.trained},
        forgotten=told.overlap.forgotten,
    )


if __name__ == "__main__":
    main()
