"""What a round costs beside the models: CPU time of the three services, read from /proc.

    python -m benchmarks.overhead [--texts 1 4 16 64] [--gammas 0 4]

The pair is nearly free (one layer of width 16, 4,096 token ids), so that almost all that is left
is the host's own work; --target and --drafter name another pair, models included.
`benchmarks.checkouts` measures another checkout beside this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure.environment import RESULTS, describe
from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.rpc.endpoint import Endpoint
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.timeline import Timeline
from tandem.tools.local.process import ROOT
from tandem.tools.local.stack import StackSettings, running

SERVICES = ("drafter", "target", "orchestrator")
_VOCAB_SIZE = 4096
_NEW_TOKENS = 200
# The drafter has the target's weights and this share of noise, which keeps an overlap of 0.69.
_NOISE = 0.05
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """A load, and what it cost.

    Attributes:
        texts: at once.
        gamma: draft length.
        rounds: with a draft, or all of them at gamma 0.
        wall_s: of the load.
        cpu_us: of each service, for a text's round.
        beside_ms: a round's wall time less its forward passes, p50.
        block_efficiency: tokens a round.
    """

    texts: int
    gamma: int
    rounds: int
    wall_s: float
    cpu_us: dict[str, float]
    beside_ms: float
    block_efficiency: float

    @property
    def rounds_per_s(self) -> float:
        """Of all texts together."""
        return self.rounds / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Of all texts together."""
        return self.rounds_per_s * self.block_efficiency

    @property
    def total_us(self) -> float:
        """CPU of the three services for a round."""
        return sum(self.cpu_us.values())


def save_pair(folder: Path) -> dict[str, Path]:
    """A target that costs nearly nothing, and a drafter that resembles it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    target = LlamaForCausalLM(config)
    paths = {"target": folder / "target", "drafter": folder / "drafter"}
    with torch.no_grad():
        # Sharper than random weights are: a row of the drafter then has some hundred tokens.
        target.lm_head.weight.mul_(2)
        target.save_pretrained(paths["target"])
        for weight in target.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * _NOISE)
    target.save_pretrained(paths["drafter"])
    return paths


@contextmanager
def serving(
    root: Path, models: Mapping[str, Path | str], **more: dict[str, str]
) -> Iterator[tuple[str, dict[str, int]]]:
    """The services of a checkout: the orchestrator's address, and the process ids.

    Args:
        root: of the checkout.
        models: of drafter and target.
        more: settings of a service, without their prefix.
    """
    services: dict[str, dict[str, str]] = {
        name: {"MODEL": str(model), "MAX_LENGTH": "512"} | more.get(name, {})
        for name, model in models.items()
    }
    services["orchestrator"] = {}
    for settings in services.values():
        settings |= {"LISTEN": "127.0.0.1:0", "DRAIN_SECONDS": "0"}
    with running(StackSettings(services, root=root)) as stack:
        ids = {name: process.id for name, process in stack.processes.items()}
        yield stack.addresses["orchestrator"], ids


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def _generations(count: int, gamma: int, first_seed: int) -> list[pb.Generation]:
    return [
        pb.Generation(
            prompt_token_ids=[1 + (seed * 7 + i) % 2000 for i in range(8)],
            sampling=common_pb2.Sampling(temperature=1.0, seed=seed),
            stopping=pb.Stopping(max_new_tokens=_NEW_TOKENS, ignore_eos=True),
            speculation=pb.Speculation(gamma=gamma),
        )
        for seed in range(first_seed, first_seed + count)
    ]


async def measure(
    where: Endpoint | str, pids: dict[str, int], texts: int, gamma: int, per_client: int
) -> Cost:
    """A closed loop of so many clients, after a warm-up."""
    async with LoadGenerator(where) as generator:
        await generator.closed_loop(_generations(texts, gamma, 10_000), texts)
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        started = time.perf_counter()
        timelines = await generator.closed_loop(_generations(texts * per_client, gamma, 0), texts)
        wall = time.perf_counter() - started
        spent = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    return _cost(timelines, texts, gamma, wall, spent)


def _cost(
    timelines: Sequence[Timeline], texts: int, gamma: int, wall_s: float, spent: dict[str, float]
) -> Cost:
    failed = [timeline.error for timeline in timelines if timeline.summary is None]
    if failed:
        raise RuntimeError(f"{len(failed)} texts failed, the first with {failed[0]}")
    summaries = [timeline.summary for timeline in timelines if timeline.summary is not None]
    rounds = sum(summary.rounds - 1 for summary in summaries)
    beside = [s for timeline in timelines for s in timeline.beside_models_s]
    return Cost(
        texts,
        gamma,
        rounds,
        wall_s,
        {name: seconds / rounds * 1e6 for name, seconds in spent.items()},
        median(beside) * 1e3 if beside else 0.0,
        sum(summary.new_tokens - 1 for summary in summaries) / rounds,
    )


def _table(found: Sequence[Cost]) -> Table:
    names = [f"{name}, µs" for name in SERVICES]
    columns = (
        "texts",
        "gamma",
        *names,
        "sum, µs",
        "rounds/s",
        "tokens/s",
        "beside, ms",
        "BE",
    )
    table = Table(*columns, title="CPU of a text's round")
    for cost in found:
        table.add_row(
            str(cost.texts),
            str(cost.gamma),
            *(f"{cost.cpu_us[name]:,.0f}" for name in SERVICES),
            f"{cost.total_us:,.0f}",
            f"{cost.rounds_per_s:,.0f}",
            f"{cost.tokens_per_s:,.0f}",
            f"{cost.beside_ms:.2f}",
            f"{cost.block_efficiency:.2f}",
        )
    return table


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--gammas", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--target", type=Path, help="a target of your own; needs --drafter")
    parser.add_argument("--drafter", type=Path, help="its drafter")
    parser.add_argument("--repeats", type=int, default=1, help="of the whole")
    parser.add_argument("--per-client", type=int, default=4, help="texts each client has written")
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead.json")
    options = parser.parse_args()
    found: list[Cost] = []
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        models = save_pair(Path(scratch))
        if options.target:
            models = {"target": options.target.resolve(), "drafter": options.drafter.resolve()}
        for _ in range(options.repeats):
            with serving(ROOT, models) as (address, pids):
                for gamma in options.gammas:
                    for texts in options.texts:
                        count = max(options.per_client, 8 // texts)
                        found.append(asyncio.run(measure(address, pids, texts, gamma, count)))
                        console.print(f"[dim]{texts} {gamma} {found[-1].total_us:.0f} µs[/]")
    console.print(_table(found))
    rows = [asdict(cost) for cost in found]
    options.out.write_text(json.dumps({**describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
