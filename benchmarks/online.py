"""What a drafter learns from its traffic, and what that costs the texts beside it.

    python -m benchmarks.online [--texts 300] [--seconds 30] [--minutes 8]

The embedded pair writes texts that continue C headers, which its drafter has never seen: those of
Python's include folder, or of torch's where there is none. Each version of the weights that it
serves is measured afterwards on what the target writes after headers that no text came from, and
at home, after held-out Python. Then texts are written in turn while learning is frozen and while
it goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.measure.environment import RESULTS, ROOT, keep, result_file
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked, summaries
from models import corpus
from tandem.distillation.divergences import tvd
from tandem.distillation.drafters import read_model, read_tokenizer
from tandem.distillation.teachers import continue_rows
from tandem.drafter.v1 import learning_pb2, learning_pb2_grpc
from tandem.inference.loading.learnt_weights import load_weights
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.local.pair import Pair

_PROMPT, _NEW, _AT_ONCE = 64, 448, 4
# Texts that are measured on, and those of a turn.
_MEASURED, _SHORT = 96, 192
# Texts between two looks at what is accepted.
_GROUP = 50
_TURN_TEXTS = 12
_POLL_SECONDS = 0.5

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Version:
    """Weights that were served.

    Attributes:
        number: 0 for the checkpoint's.
        texts: that had been written when they came.
        seconds: since the first text.
        fresh: α on headers that no text came from.
        home: α on held-out Python.
    """

    number: int
    texts: int
    seconds: float
    fresh: float
    home: float


def headers() -> tuple[list[str], list[str]]:
    """C headers to continue, and others to measure on."""
    folder = Path(sysconfig.get_paths()["include"])
    if not any(folder.rglob("*.h")):
        folder = Path(torch.__file__).parent / "include"
    train: list[str] = []
    fresh: list[str] = []
    for path in sorted(folder.rglob("*.h")):
        with suppress(UnicodeDecodeError):
            out = hashlib.sha256(path.name.encode()).digest()[0] % 5 == 0
            (fresh if out else train).append(path.read_text())
    return train, fresh


def cuts(texts: Sequence[str], tokenizer: Any, count: int, length: int, seed: int) -> Ids:
    """[count, length] parts of texts, of any place."""
    streams = [np.array(tokenizer.encode(text), np.int64) for text in texts]
    streams = [stream for stream in streams if len(stream) >= length]
    numbers = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        stream = streams[numbers.integers(len(streams))]
        begin = numbers.integers(len(stream) - length + 1)
        found.append(stream[begin : begin + length])
    return np.stack(found)


def written(target: Any, prompts: Ids, seed: int) -> Tensor:
    """[n, time] prompts with what the target writes after them at temperature 1."""
    room = np.zeros((len(prompts), _SHORT), np.int64)
    tokens = torch.from_numpy(np.concatenate([prompts, room], 1))
    known = torch.full((len(prompts),), _PROMPT)
    vocabulary = target.config.get_text_config().vocab_size
    return continue_rows(target, tokens, known, vocabulary, torch.Generator().manual_seed(seed))


@torch.no_grad()
def alpha(target: Any, drafter: Any, texts: Tensor) -> float:
    """The mean of Σ min(p, q) at the places that the target wrote, of texts [n, time]."""
    shared = []
    for part in torch.split(texts, 8):
        rows = [
            model(input_ids=part[:, :-1], use_cache=False).logits[:, _PROMPT - 1 :].log_softmax(-1)
            for model in (target, drafter)
        ]
        shared.append(1 - tvd(*rows))
    return float(torch.cat(shared).mean())


async def watch(folder: Path, kept: Path, done: list[int], began: float) -> None:
    """Keep the weights of each version: its number, the texts and seconds before it."""
    seen = 0
    while True:
        with suppress(OSError, ValueError):
            state = json.loads((folder / "state.json").read_text())
            if state["version"] > seen:
                name = f"{state['version']}-{len(done)}-{time.monotonic() - began:.1f}"
                shutil.copy(folder / "weights" / state["weights"], kept / name)
                seen = state["version"]
        await asyncio.sleep(_POLL_SECONDS)


async def learn(address: str, prompts: Ids, folder: Path, kept: Path, options: Any) -> list[float]:
    """Write all texts, then wait; what was accepted of each group."""
    done: list[int] = []
    began = time.monotonic()
    watching = asyncio.create_task(watch(folder, kept, done, began))
    accepted = []
    async with LoadGenerator(address) as generator:
        for first in range(0, len(prompts), _GROUP):
            group = [
                asked(first + number, _NEW, prompt=prompt.tolist(), gamma=4)
                for number, prompt in enumerate(prompts[first : first + _GROUP])
            ]
            found = summaries(await generator.closed_loop(group, _AT_ONCE))
            done += range(len(found))
            places = sum(one.overlap_positions for one in found)
            accepted.append(sum(one.overlap_sum for one in found) / places)
            left = options.minutes * 60 * len(done) / len(prompts) - (time.monotonic() - began)
            await asyncio.sleep(max(left, 0))  # evenly over the time
    watching.cancel()
    return accepted


async def cost(address: str, admin: str, prompts: Ids, turns: int) -> list[dict[str, float]]:
    """p50 of a round in ms, frozen and learning in turn."""
    found = []
    async with grpc.aio.insecure_channel(admin) as channel, LoadGenerator(address) as generator:
        stub: Any = learning_pb2_grpc.LearningServiceStub(channel)
        for turn in range(turns + 1):
            row = {}
            for name, frozen in (("frozen", True), ("learning", False)):
                await stub.FreezeLearning(learning_pb2.FreezeLearningRequest(frozen=frozen))
                while not frozen:
                    told = await stub.GetLearning(learning_pb2.GetLearningRequest())
                    if told.steps:
                        break
                    await asyncio.sleep(_POLL_SECONDS)
                texts = [
                    asked(number, _SHORT, prompt=prompt.tolist(), gamma=4)
                    for number, prompt in enumerate(prompts[:_TURN_TEXTS])
                ]
                rounds = [
                    wall / 1e6
                    for one in summaries(await generator.closed_loop(texts, 1))
                    for wall in one.stages.round_wall_ns
                ]
                row[name] = median(rounds)
            if turn:  # the first warms up
                found.append(row)
    return found


def trainer_mib(folder: Path) -> float:
    """The most memory that the trainer of a folder has had; 0 where none is at work."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if b"tandem.online" in command and str(folder).encode() in command:
                status = (entry / "status").read_text()
                return int(status.split("VmHWM:")[1].split()[0]) / 1024
    return 0.0


def measured(kept: Path, pair: Pair, fresh: Ids, home: Ids) -> list[Version]:
    """All versions, on what the target writes after prompts."""
    target, drafter = (
        read_model(str(path), torch.float32, torch.device("cpu"))
        for path in (pair.target, pair.drafter)
    )
    texts = [written(target, prompts, seed) for seed, prompts in enumerate((fresh, home))]

    def figures() -> tuple[float, float]:
        first, second = (alpha(target, drafter, each) for each in texts)
        return first, second

    found = [Version(0, 0, 0.0, *figures())]
    for path in sorted(kept.iterdir(), key=lambda path: int(path.name.split("-")[0])):
        number, count, seconds = path.name.split("-")
        load_weights(drafter, path)
        found.append(Version(int(number), int(count), float(seconds), *figures()))
    return found


def picture(versions: Sequence[Version], path: Path) -> None:
    """α over the texts that were written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    texts = [version.texts for version in versions]
    for name, label in (
        ("fresh", "after fresh C headers"),
        ("home", "at home: after held-out Python"),
    ):
        values = [getattr(version, name) for version in versions]
        axes.plot(texts, values, marker="o", markersize=3, label=label)
    axes.set_xlabel("texts that continued C headers")
    axes.set_ylabel("α at temperature 1")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    """Learn, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=30.0, help="of training a minute")
    parser.add_argument("--minutes", type=float, default=8.0, help="over which texts are spread")
    parser.add_argument("--turns", type=int, default=7, help="frozen and learning")
    parser.add_argument("--out", type=result_file, default=RESULTS / "online.json")
    parser.add_argument("--picture", type=Path, default=RESULTS / "online.png")
    options = parser.parse_args()
    console = Console()
    pair = Pair(str(ROOT / "models" / "target"), str(ROOT / "models" / "drafter"))
    tokenizer = read_tokenizer(str(pair.target))
    train, other = headers()
    prompts = cuts(train, tokenizer, options.texts, _PROMPT, 1)
    at_home = [text for name, text in corpus.sources() if corpus.held_out(name)]
    fresh, home = (cuts(texts, tokenizer, _MEASURED, _PROMPT, 2) for texts in (other, at_home))
    with tempfile.TemporaryDirectory() as scratch:
        folder, kept = Path(scratch) / "state", Path(scratch) / "kept"
        kept.mkdir()
        drafter = {
            "ONLINE": str(options.seconds),
            "ONLINE_FOLDER": str(folder),
            "ADMIN_LISTEN": "127.0.0.1:0",
        }
        with serving(pair, {"drafter": drafter}) as stack:
            address = stack.addresses["orchestrator"]
            console.print(f"{options.texts} texts in {options.minutes:g} minutes")
            accepted = asyncio.run(learn(address, prompts, folder, kept, options))
            memory = trainer_mib(folder)
            console.print("what it costs")
            admin = stack.further_addresses("ADMIN_LISTEN")["drafter"]
            turns = asyncio.run(cost(address, admin, prompts, options.turns))
        versions = measured(kept, pair, fresh, home)
    ratios = [turn["learning"] / turn["frozen"] for turn in turns]
    rows = [
        {
            "version": version.number,
            "texts": version.texts,
            "seconds": f"{version.seconds:.0f}",
            "α, fresh": f"{version.fresh:.3f}",
            "α, home": f"{version.home:.3f}",
        }
        for version in versions
    ]
    console.print(table_of(rows))
    console.print(
        f"α of each {_GROUP} texts: {', '.join(f'{each:.3f}' for each in accepted)}\n"
        f"p50 of a round, learning over frozen: {median(ratios):.3f}"
        f" ({min(ratios):.3f} to {max(ratios):.3f}); the trainer has had {memory:.0f} MiB"
    )
    keep(
        options.out,
        seconds_a_minute=options.seconds,
        minutes=options.minutes,
        versions=[asdict(version) for version in versions],
        accepted=accepted,
        mean_accepted=fmean(accepted),
        rounds_ms=turns,
        round_ratio=ratios,
        trainer_mib=memory,
    )
    picture(versions, options.picture)


if __name__ == "__main__":
    main()
