"""The cost of a round outside the models: CPU time of the three services, read from /proc.

    python -m benchmarks.overhead [--texts 1 4 16 64] [--gammas 0 4] [--inside]

With --inside each run is made twice, with drafts by a drafter and by the target itself. The pair
costs almost nothing (one layer of width 16, 4,096 token ids), so that nearly all of the time is the
host's own work. With --target and --drafter, the time of those models is included.
`benchmarks.checkouts` compares another checkout with this one.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.measure.environment import RESULTS, keep, result_file
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked, summaries, token_ids
from benchmarks.measure.vitals import cpu_seconds
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack

SERVICES = ("drafter", "target", "orchestrator")
_VOCAB_SIZE = 4096
_NEW_TOKENS = 200
_MAX_LENGTH = 512
# The drafter has the target's weights plus this share of noise, for an overlap of 0.69.
_NOISE = 0.05


@dataclass(frozen=True)
class Cost:
    """A load, and its cost.

    Attributes:
        inside: whether the target drafts.
        texts: at once.
        gamma: draft length.
        rounds: number of rounds, without prefills.
        wall_s: of the load.
        cpu_us: CPU time of each service per round of a text.
        beside_ms: a round's wall time minus its forward passes, p50.
        block_efficiency: tokens per round.
    """

    inside: bool
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
        """CPU time of the three services per round."""
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
        # Sharper than random weights, so that a row of the drafter has some hundred tokens.
        target.lm_head.weight.mul_(2)
        target.save_pretrained(paths["target"])
        for weight in target.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * _NOISE)
    target.save_pretrained(paths["drafter"])
    return paths


def _generations(count: int, gamma: int, first_seed: int) -> list[pb.Generation]:
    return [
        asked(seed, _NEW_TOKENS, prompt=token_ids(seed, 8), gamma=gamma)
        for seed in range(first_seed, first_seed + count)
    ]


async def measure(
    stack: Stack, texts: int, gamma: int, per_client: int, inside: bool = False
) -> Cost:
    """A closed loop of `texts` clients, after a warm-up.

    Raises:
        RuntimeError: a text failed.
    """

    def spent() -> dict[str, float]:
        return {name: cpu_seconds(process.id) for name, process in stack.processes.items()}

    async with LoadGenerator(stack.addresses["orchestrator"]) as generator:
        await generator.closed_loop(_generations(texts, gamma, 10_000), texts)
        before, started = spent(), time.perf_counter()
        timelines = await generator.closed_loop(_generations(texts * per_client, gamma, 0), texts)
        wall, after = time.perf_counter() - started, spent()
    found = summaries(timelines)
    rounds = sum(summary.rounds - 1 for summary in found)
    beside = [s for timeline in timelines for s in timeline.beside_models_s]
    return Cost(
        inside,
        texts,
        gamma,
        rounds,
        wall,
        {name: (after[name] - before[name]) / rounds * 1e6 for name in before},
        median(beside) * 1e3 if beside else 0.0,
        sum(summary.new_tokens - 1 for summary in found) / rounds,
    )


def _row(cost: Cost) -> dict[str, object]:
    return {
        "drafts by": "target" if cost.inside else "drafter",
        "texts": cost.texts,
        "gamma": cost.gamma,
        **{f"{name}, µs": cost.cpu_us.get(name, 0.0) for name in SERVICES},
        "sum, µs": cost.total_us,
        "rounds/s": cost.rounds_per_s,
        "tokens/s": cost.tokens_per_s,
        "beside, ms": cost.beside_ms,
        "BE": cost.block_efficiency,
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--gammas", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--target", type=Path, help="a target of your own; needs --drafter")
    parser.add_argument("--drafter", type=Path, help="its drafter")
    parser.add_argument("--inside", action="store_true", help="compare drafts inside the target")
    parser.add_argument("--repeats", type=int, default=1, help="of the whole run")
    parser.add_argument("--per-client", type=int, default=4, help="texts of each client")
    parser.add_argument("--out", type=result_file, default=RESULTS / "overhead.json")
    options = parser.parse_args()
    found: list[Cost] = []
    console = Console(width=130)
    with tempfile.TemporaryDirectory() as scratch:
        models = save_pair(Path(scratch))
        if options.target:
            models = {"target": options.target, "drafter": options.drafter}
        pair = Pair(str(models["target"]), str(models["drafter"]), max_length=_MAX_LENGTH)
        placements = [False, True] if options.inside else [False]
        for inside in placements * options.repeats:
            with serving(replace(pair, inside=inside)) as stack:
                for gamma in options.gammas:
                    for texts in options.texts:
                        count = max(options.per_client, 8 // texts)
                        found.append(asyncio.run(measure(stack, texts, gamma, count, inside)))
                        console.print(f"[dim]{texts} {gamma} {found[-1].total_us:.0f} µs[/]")
    console.print(table_of(map(_row, found), "CPU of a text's round"))
    keep(options.out, rows=[asdict(cost) for cost in found])


if __name__ == "__main__":
    main()
