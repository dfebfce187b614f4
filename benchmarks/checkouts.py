"""Compare this checkout's services with another's: the same texts in turn, by rule and gamma.

    git worktree add ../before COMMIT
    python -m benchmarks.checkouts ../before [--rules block token] [--gammas 2 4 8] [--turns 12]

Both stacks run all the time, and the one that is not asked is idle. In each turn both write the
same texts, one stack after the other; the load generator is this checkout's. The pair is that of
`make bench` unless --target and --drafter name another.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import grpc
from rich.console import Console
from rich.progress import track

from benchmarks.expand import expand
from benchmarks.measure.environment import RESULTS, ROOT, keep, result_file
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import PROMPTS, asked, summaries
from benchmarks.peers.plan import FULL
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.report import LoadReport
from tandem.tools.load.timeline import Timeline
from tandem.tools.local.pair import Pair, embedded

_NEW_TOKENS = 128
_MAX_LENGTH = 512
_CODES = ("ours", "theirs")


@dataclass(frozen=True)
class Found:
    """One turn of one checkout.

    Attributes:
        code: which checkout's services, "ours" or "theirs".
        rule: that verified.
        gamma: draft length; 0 without drafts, whatever the rule.
        turn: its number.
        tokens_per_s: of all texts together.
        beside_ms: a drafted round's wall time minus its forward passes, p50; 0 without drafts.
        tokens: of all texts.
        rounds: of all texts.
        passes: model calls of drafter and target.
        fed: token positions that both computed.
    """

    code: str
    rule: str
    gamma: int
    turn: int
    tokens_per_s: float
    beside_ms: float
    tokens: int
    rounds: int
    passes: int
    fed: int


class Checkout:
    """The services of one checkout.

    Args:
        addresses: of the three services, by name.
        spells: whether the target has a tokenizer; else prompts' bytes are sent as token ids.
    """

    def __init__(self, addresses: Mapping[str, str], spells: bool) -> None:
        self._spells = spells
        self._orchestrator = addresses["orchestrator"]
        drafter, target = (grpc.insecure_channel(addresses[name]) for name in ("drafter", "target"))
        self._drafter = drafter_pb2_grpc.DrafterServiceStub(drafter)
        self._target = target_pb2_grpc.TargetServiceStub(target)

    def _prompt(self, seed: int) -> bytes | None:
        return None if self._spells else PROMPTS[seed % len(PROMPTS)].encode()

    def _counts(self) -> tuple[int, int]:
        """Model calls and positions fed since the start, of drafter and target together."""
        stats = (
            self._drafter.GetModelInfo(drafter_pb2.GetModelInfoRequest()).stats,
            self._target.GetModelInfo(target_pb2.GetModelInfoRequest()).stats,
        )
        return sum(one.forward_passes for one in stats), sum(one.fed_tokens for one in stats)

    def write(self, code: str, rule: str, gamma: int, turn: int, texts: int) -> Found:
        """Write `texts` texts at once; their seeds follow from the turn.

        Raises:
            RuntimeError: a text failed.
        """
        seeds = range(turn * texts, (turn + 1) * texts)
        generations = [
            asked(seed, _NEW_TOKENS, prompt=self._prompt(seed), verifier=rule, gamma=gamma)
            for seed in seeds
        ]
        before = self._counts()
        lines = asyncio.run(_written(self._orchestrator, generations))
        passes, fed = (now - then for now, then in zip(self._counts(), before, strict=True))
        rounds = sum(summary.rounds for summary in summaries(lines))
        report = LoadReport.of(lines)
        beside = report.beside_models.p50 if report.beside_models else 0.0
        tokens = sum(line.tokens for line in lines)
        return Found(
            code, rule, gamma, turn, report.tokens_per_s, beside, tokens, rounds, passes, fed
        )


async def _written(address: str, generations: Sequence[pb.Generation]) -> list[Timeline]:
    async with LoadGenerator(address) as generator:
        return await generator.closed_loop(generations, len(generations))


def _a_round(found: Sequence[Found]) -> list[float]:
    """Tokens per round, and model calls and positions fed per round of both services."""
    rounds = sum(each.rounds for each in found)
    counts = ((each.tokens, each.passes, each.fed) for each in found)
    return [sum(column) / rounds for column in zip(*counts, strict=True)]


def _rows(found: Sequence[Found]) -> Iterator[dict[str, object]]:
    """Medians over turns; ratios and differences within a turn; counts over all turns."""
    for rule, gamma in dict.fromkeys((each.rule, each.gamma) for each in found):
        mine = [each for each in found if (each.rule, each.gamma) == (rule, gamma)]
        ours, theirs = both = [[each for each in mine if each.code == code] for code in _CODES]
        pairs = list(zip(ours, theirs, strict=True))
        ratios = sorted(one.tokens_per_s / other.tokens_per_s for one, other in pairs)
        counts = zip(_a_round(ours), _a_round(theirs), strict=True)
        tokens, passes, fed = (f"{one:.3f}, {other:.3f}" for one, other in counts)
        more = median(one.beside_ms - other.beside_ms for one, other in pairs)
        yield {
            "rule": rule,
            "γ": gamma,
            "tokens/s": ", ".join(f"{median(one.tokens_per_s for one in of):.1f}" for of in both),
            "ratio": f"{median(ratios):.3f}",
            "range": f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            "beside, ms": ", ".join(f"{median(one.beside_ms for one in of):.2f}" for of in both),
            "more, ms": f"{more:+.2f}",
            "tokens a round": tokens,
            "passes a round": passes,
            "fed tokens a round": fed,
        }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--rules", nargs="+", default=["block", "token"])
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--texts", type=int, default=1, help="texts at once")
    parser.add_argument("--target", type=Path, help="a target of your own; needs --drafter")
    parser.add_argument("--drafter", type=Path, help="its drafter")
    parser.add_argument("--out", type=result_file, default=RESULTS / "checkouts.json")
    options = parser.parse_args()
    if not (options.other / "pyproject.toml").is_file():
        parser.error(f"{options.other} is no checkout")
    return options


def main() -> None:
    """Measure, print a table, write JSON."""
    options = _options()
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stacks:
        models = {"target": options.target, "drafter": options.drafter}
        if not options.target:
            expand(Path(embedded("target")), FULL.shape, Path(scratch))
            models = {"target": Path(scratch), "drafter": Path(embedded("drafter"))}
        pair = Pair(str(models["target"]), str(models["drafter"]), max_length=_MAX_LENGTH)
        roots = dict(zip(_CODES, (ROOT, options.other.resolve()), strict=True))
        checkouts = {
            code: Checkout(
                stacks.enter_context(serving(pair, root=root)).addresses,
                spells=(models["target"] / "tokenizer.json").exists(),
            )
            for code, root in roots.items()
        }
        ways = [(rule, gamma) for gamma in options.gammas for rule in options.rules]
        for turn in track(range(-1, options.turns), "turns", console=Console(stderr=True)):
            for rule, gamma in ways:
                # The order alternates, so that neither checkout always follows the other.
                for code in _CODES if turn % 2 else reversed(_CODES):
                    text = checkouts[code].write(code, rule, gamma, max(turn, 0), options.texts)
                    # The first turn is a warm-up.
                    found += [text] * (turn >= 0)
    Console(width=150).print(table_of(_rows(found), "Ours, theirs"))
    keep(options.out, rows=[asdict(each) for each in found])


if __name__ == "__main__":
    main()
