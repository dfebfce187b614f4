"""Tokens a round of every drafting method and lossy rule, and what a draft costs.

    python -m benchmarks.methods [--only medusa "exit 3"] [--heads FOLDER ...] [--inside]
                                 [--tokens 3000] [--temperatures 0 1]

Texts of the embedded target after held-out prompts, one at a time, one method after the other in
one run: drafts of depth 4, trees of 16 nodes (retrieval in an index: 64), decided by `token` unless
the row names a rule. At temperature 0 a text ends where eight tokens come the third time: what
loops is easy to guess. Standard errors are over texts. The index of `corpus` has no text of the
prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.ratio import ratio
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked
from benchmarks.methods.rows import DEPTH, METHODS, NODES, Method
from benchmarks.methods.texts import held_out, training_index
from models.sampling import until_it_loops
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.tools.local.pair import EMBEDDED_HEADS, Pair, embedded
from tandem.tools.local.process import ROOT
from tandem.tools.local.stack import Stack

NEW_TOKENS = 250
# A GPU that waits for its memory, one with many texts, and a CPU.
FURTHER_ROW = (0.01, 0.05, 0.25)


@dataclass(frozen=True)
class Line:
    """A method at a temperature.

    Attributes:
        tokens: a round, with their standard error.
        overlap: of the drafter's rows with the target's.
        nodes: drafted tokens a round.
        rows: that the target computes, a round: the last token, the draft and its probes; 0 where
            the target drafts.
        speed: over plain decoding, as predicted for a target whose pass takes longer by a share for
            each further row; without the drafter's own time. By the shares of `FURTHER_ROW`.
        passes: of the drafter's models, a drafted token.
        draft_ms: time of the drafter's passes and draws, a round.
        draft_bytes: of a draft's rows.
    """

    method: str
    temperature: float
    tokens: float
    tokens_se: float
    overlap: float
    nodes: float
    rows: float
    speed: tuple[float, ...]
    passes: float
    draft_ms: float
    draft_bytes: float


class Served:
    """The three services, asked for one text after the other."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], *, inside: bool) -> None:
        own, drafter, target = channels
        self._target = target_pb2_grpc.TargetServiceStub(target)
        self._orchestrator = orchestrator_pb2_grpc.OrchestratorServiceStub(own)
        self._drafter = None if inside else drafter_pb2_grpc.DrafterServiceStub(drafter)

    async def passes(self) -> int:
        """Of the drafter's models so far; 0 where the target drafts."""
        if self._drafter is None:
            return 0
        reply = await self._drafter.GetModelInfo(drafter_pb2.GetModelInfoRequest())
        return int(reply.stats.forward_passes)

    async def rows(self) -> int:
        """That the target has computed so far; 0 where its drafter's are among them."""
        if self._drafter is None:
            return 0
        reply = await self._target.GetModelInfo(target_pb2.GetModelInfoRequest())
        return int(reply.stats.fed_tokens)

    async def text(self, request: pb.Generation) -> tuple[list[int], pb.Summary]:
        """The tokens of a text, and its summary."""
        reply = await self._orchestrator.Complete(pb.CompleteRequest(generation=request))
        return list(reply.token_ids), reply.summary


async def measure(
    stack: Stack,
    name: str,
    method: Method,
    temperature: float,
    prompts: Sequence[list[int]],
    *,
    inside: bool,
) -> Line:
    """A method at a temperature."""
    addresses = stack.addresses
    size: dict[str, Any] = {"max_nodes": method.nodes} if method.nodes else {}
    async with (
        grpc.aio.insecure_channel(addresses["orchestrator"]) as own,
        grpc.aio.insecure_channel(addresses.get("drafter", addresses["orchestrator"])) as drafter,
        grpc.aio.insecure_channel(addresses["target"]) as target,
    ):
        served = Served((own, drafter, target), inside=inside)
        lengths = [NEW_TOKENS] * len(prompts)
        if temperature == 0:
            plain = [asked(0, NEW_TOKENS, 0, prompt, gamma=0) for prompt in prompts]
            lengths = [until_it_loops((await served.text(request))[0]) for request in plain]
        before, computed = await served.passes(), await served.rows()
        found: list[pb.Summary] = []
        for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            request = asked(
                *(seed, length, temperature, prompt),
                verifier=method.rule,
                gamma=method.depth,
                **size,
            )
            found.append((await served.text(request))[1])
        # The prompt takes a pass of each text.
        passes = await served.passes() - before - len(prompts)
        computed = max(await served.rows() - computed - sum(map(len, prompts)), 0)
    drafted = sum(summary.drafted_tokens for summary in found)
    rounds = [float(summary.rounds) for summary in found]
    busy = sum(s.stages.draft_forward_busy_ns + s.stages.draft_draw_busy_ns for s in found)
    overlaps = ratio([s.overlap_sum for s in found], [float(s.overlap_positions) for s in found])
    # The first token comes with the prefill.
    emitted = [float(summary.new_tokens - 1) for summary in found]
    tokens, rows = ratio(emitted, rounds), computed / sum(rounds)
    return Line(
        name,
        temperature,
        *tokens,
        overlaps[0],
        drafted / sum(rounds),
        rows,
        tuple(tokens[0] / (1 + share * (rows - 1)) for share in FURTHER_ROW),
        max(passes, 0) / max(drafted, 1),
        busy / sum(rounds) / 1e6,
        sum(summary.draft_bytes for summary in found) / sum(rounds),
    )


def _is_there(method: Method) -> bool:
    """Whether the embedded target has the head of a method, or it needs none."""
    recipe = method.recipe
    return recipe not in EMBEDDED_HEADS or (ROOT / "models" / recipe / "config.json").is_file()


def main() -> None:
    """Measure, print and write benchmarks/results/methods.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], choices=METHODS, metavar="METHOD")
    parser.add_argument(
        "--heads", nargs="+", default=[], metavar="FOLDER", help="further heads of the target"
    )
    parser.add_argument("--inside", action="store_true", help="the target drafts by itself")
    parser.add_argument("--tokens", type=int, default=3000, help="of each case")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument(
        "--skip", default="models/skip.json", help="file of the rows with sublayers left out"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "methods.json")
    options = parser.parse_args()
    console = Console(width=160)
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "target" / "tokenizer.json"))
    prompts = held_out(tokenizer, -(-options.tokens // NEW_TOKENS))
    chosen = {name: METHODS[name] for name in options.only or METHODS if _is_there(METHODS[name])}
    chosen |= {Path(head).name: Method(head, nodes=NODES) for head in options.heads}
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as scratch, Progress(console=console) as bar:
        given = {"SKIP": options.skip}
        if any("INDEX" in method.drafter for method in chosen.values()):
            given["INDEX"] = str(training_index(tokenizer, Path(scratch)))
        for name, method in bar.track(chosen.items(), description="methods"):
            drafter = {key: given.get(key, value) for key, value in method.drafter.items()}
            more = {
                "drafter": {key: _placed(value) for key, value in drafter.items()},
                "target": {key: _placed(value) for key, value in method.target.items()},
                "orchestrator": {"ALLOW_LOSSY": "true"},
            }
            with serving(_pair(method, inside=options.inside), more) as stack:
                for temperature in options.temperatures:
                    found = measure(
                        stack, name, method, temperature, prompts, inside=options.inside
                    )
                    lines.append(asyncio.run(found))
            _write(options.output, lines, inside=options.inside)
    console.print(table_of(map(asdict, lines)))


def _placed(value: str) -> str:
    """A path of this checkout, wherever the services run; other values stay."""
    return str(ROOT / value) if value.startswith("models/") else value


def _pair(method: Method, *, inside: bool) -> Pair:
    if "/" in method.recipe:
        return Pair(target=embedded("target"), drafter=method.recipe, inside=inside)
    return Pair(recipe=method.recipe, inside=inside)


def _write(path: Path, lines: Sequence[Line], *, inside: bool) -> None:
    told = [asdict(line) for line in lines]
    keep(path, depth=DEPTH, nodes=NODES, further_row=FURTHER_ROW, inside=inside, lines=told)


if __name__ == "__main__":
    main()
