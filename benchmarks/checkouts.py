"""This checkout's services beside another's: the same chains in turn, by rule and draft length.

    git worktree add ../before COMMIT
    python -m benchmarks.checkouts ../before [--rules block token] [--gammas 2 4 8] [--turns 12]

Both stacks are there all the time, and the one that is not asked has nothing to do. Each turn has
either write the same texts, one after the other; the loads come from this checkout. The pair is
that of `make bench` unless --target and --drafter name another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.expand import expand
from benchmarks.measure.environment import RESULTS, describe
from benchmarks.measure.prompts import PROMPTS
from benchmarks.peers.plan import FULL
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.timeline import Timeline
from tandem.tools.local.pair import embedded
from tandem.tools.local.process import ROOT
from tandem.tools.local.stack import StackSettings, running

_NEW_TOKENS = 128
_CODES = ("ours", "theirs")


@dataclass(frozen=True)
class Found:
    """One turn of one checkout.

    Attributes:
        code: whose services.
        rule: that verified.
        gamma: draft length; 0 without drafts, of whatever rule.
        turn: number of it.
        tokens_per_s: of all texts together.
        beside_ms: a drafted round's wall time less its forward passes, p50; 0 without drafts.
        tokens: that all texts have.
        rounds: of all texts.
        passes: of each service: model calls.
        fed: of each service: token positions computed.
    """

    code: str
    rule: str
    gamma: int
    turn: int
    tokens_per_s: float
    beside_ms: float
    tokens: int
    rounds: int
    passes: dict[str, int]
    fed: dict[str, int]


class Checkout:
    """The services of one checkout.

    Args:
        addresses: of the three, by name.
        spells: the target has a tokenizer; one without gets the prompts' bytes as token ids.
    """

    def __init__(self, addresses: Mapping[str, str], spells: bool) -> None:
        self._spells = spells
        self._orchestrator = addresses["orchestrator"]
        drafter, target = (grpc.insecure_channel(addresses[name]) for name in ("drafter", "target"))
        self._drafter = drafter_pb2_grpc.DrafterServiceStub(drafter)
        self._target = target_pb2_grpc.TargetServiceStub(target)

    def _counts(self) -> dict[str, tuple[int, int]]:
        """Model calls and positions fed since each service's start."""
        drafter = self._drafter.GetModelInfo(drafter_pb2.GetModelInfoRequest()).stats
        target = self._target.GetModelInfo(target_pb2.GetModelInfoRequest()).stats
        return {
            name: (stats.forward_passes, stats.fed_tokens)
            for name, stats in (("drafter", drafter), ("target", target))
        }

    def _prompt(self, number: int) -> dict[str, Any]:
        prompt = PROMPTS[number % len(PROMPTS)]
        return {"prompt": prompt} if self._spells else {"prompt_token_ids": prompt.encode()}

    def write(self, code: str, rule: str, gamma: int, turn: int, texts: int) -> Found:
        """So many texts at once; the turn is their seed.

        Raises:
            RuntimeError: a text failed.
        """
        asked = [
            pb.Generation(
                **self._prompt(turn * texts + text),
                sampling=common_pb2.Sampling(temperature=1.0, seed=turn * texts + text),
                stopping=pb.Stopping(max_new_tokens=_NEW_TOKENS, ignore_eos=True),
                speculation=pb.Speculation(gamma=gamma, verifier=rule),
            )
            for text in range(texts)
        ]
        before = self._counts()
        lines = asyncio.run(_written(self._orchestrator, asked))
        counted = {
            name: tuple(now - then for now, then in zip(after, before[name], strict=True))
            for name, after in self._counts().items()
        }
        failed = [line.error for line in lines if line.summary is None]
        if failed:
            raise RuntimeError(f"{len(failed)} texts failed, the first with {failed[0]}")
        beside = [s for line in lines for s in line.beside_models_s]
        took = max(line.ended_s for line in lines) - min(line.asked_s for line in lines)
        tokens = sum(line.tokens for line in lines)
        return Found(
            code,
            rule,
            gamma,
            turn,
            tokens / took,
            median(beside) * 1e3 if beside else 0.0,
            tokens,
            sum(line.summary.rounds for line in lines if line.summary),
            {name: count[0] for name, count in counted.items()},
            {name: count[1] for name, count in counted.items()},
        )


async def _written(address: str, asked: Sequence[pb.Generation]) -> list[Timeline]:
    async with LoadGenerator(address) as generator:
        return await generator.closed_loop(asked, len(asked))


def _a_round(found: Sequence[Found]) -> list[float]:
    """Tokens, model calls and positions fed, of both services, for one round."""
    rounds = sum(each.rounds for each in found)
    passes = sum(sum(each.passes.values()) for each in found)
    fed = sum(sum(each.fed.values()) for each in found)
    return [sum(each.tokens for each in found) / rounds, passes / rounds, fed / rounds]


def _table(found: Sequence[Found]) -> Table:
    """Medians over turns, ratios and differences of neighbours; counts are of all turns."""
    table = Table(title="Ours, theirs")
    for column in ("rule", "γ", "tokens/s", "ratio", "range", "beside, ms", "more, ms"):
        table.add_column(column)
    for column in ("tokens a round", "passes a round", "fed tokens a round"):
        table.add_column(column)
    for rule, gamma in dict.fromkeys((each.rule, each.gamma) for each in found):
        mine = [each for each in found if (each.rule, each.gamma) == (rule, gamma)]
        ours, theirs = ([each for each in mine if each.code == code] for code in _CODES)
        pairs = list(zip(ours, theirs, strict=True))
        ratios = sorted(one.tokens_per_s / other.tokens_per_s for one, other in pairs)
        counts = zip(_a_round(ours), _a_round(theirs), strict=True)
        table.add_row(
            rule,
            str(gamma),
            ", ".join(f"{median(each.tokens_per_s for each in of):.1f}" for of in (ours, theirs)),
            f"{median(ratios):.3f}",
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            ", ".join(f"{median(each.beside_ms for each in of):.2f}" for of in (ours, theirs)),
            f"{median(one.beside_ms - other.beside_ms for one, other in pairs):+.2f}",
            *(f"{one:.3f}, {other:.3f}" for one, other in counts),
        )
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--rules", nargs="+", default=["block", "token"])
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--texts", type=int, default=1, help="at once")
    parser.add_argument("--target", type=Path, help="a target of your own; needs --drafter")
    parser.add_argument("--drafter", type=Path, help="its drafter")
    parser.add_argument("--out", type=Path, default=RESULTS / "checkouts.json")
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
        services: dict[str, dict[str, str]] = {
            name: {"MODEL": str(model.resolve()), "MAX_LENGTH": "512"}
            for name, model in models.items()
        }
        services["orchestrator"] = {}
        for settings in services.values():
            settings |= {"LISTEN": "127.0.0.1:0", "DRAIN_SECONDS": "0"}
        roots = dict(zip(_CODES, (ROOT, options.other.resolve()), strict=True))
        checkouts = {
            code: Checkout(
                stacks.enter_context(running(StackSettings(services, root=root))).addresses,
                spells=(models["target"] / "tokenizer.json").exists(),
            )
            for code, root in roots.items()
        }
        ways = [(rule, gamma) for gamma in options.gammas for rule in options.rules]
        for turn in track(range(-1, options.turns), "turns", console=Console(stderr=True)):
            for rule, gamma in ways:
                # Who is first changes with the turn, so that neither always follows the other.
                for code in _CODES if turn % 2 else reversed(_CODES):
                    text = checkouts[code].write(code, rule, gamma, max(turn, 0), options.texts)
                    # The first turn is a warm-up.
                    found += [text] * (turn >= 0)
    Console(width=150).print(_table(found))
    rows = [asdict(each) for each in found]
    options.out.write_text(json.dumps({**describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
