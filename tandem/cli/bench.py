"""tandem bench: load on running services, and what it did to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.exit_codes import reported
from tandem.cli.options import DEFAULT_ADDRESS, AddressOption
from tandem.cli.terminal import err, out, write_exactly
from tandem.failure import Failure, Misconfigured

if TYPE_CHECKING:
    from tandem.load.timeline import Timeline
    from tandem.orchestrator.v1 import orchestrator_pb2 as pb

_LOAD = "Load"
_TEXTS = "Texts"

_Texts = Annotated[int, typer.Option(metavar="N", min=1, help="Texts.", rich_help_panel=_LOAD)]
_Concurrency = Annotated[
    int,
    typer.Option(
        "--concurrency",
        "-c",
        metavar="N",
        min=1,
        help="Closed loop: clients that ask again as soon as they are answered.",
        rich_help_panel=_LOAD,
    ),
]
_Rate = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        min=1e-3,
        help="Open loop instead: X texts a second on average, at random moments.",
        rich_help_panel=_LOAD,
    ),
]
_WarmUp = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="Texts before, not counted.", rich_help_panel=_LOAD),
]
_Timeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", min=0, help="What takes longer is an error.", rich_help_panel=_LOAD
    ),
]
_Prompt = Annotated[
    list[str] | None,
    typer.Option(help="Prompts, taken in turn. Repeatable.", rich_help_panel=_TEXTS),
]
_MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens",
        "-n",
        metavar="N",
        min=1,
        help="Tokens of every text: the model's end of text is ignored.",
        rich_help_panel=_TEXTS,
    ),
]
_Temperature = Annotated[
    float, typer.Option(metavar="X", min=0, help="Of every text.", rich_help_panel=_TEXTS)
]
_Seed = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="Of the open loop's moments and of the first text; each further one adds 1.",
        rich_help_panel=_TEXTS,
    ),
]
_Verifier = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Default: the orchestrator's.", rich_help_panel=_TEXTS),
]
_Gamma = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Tokens to draft a round; 0 decodes plainly. Default: the orchestrator's.",
        rich_help_panel=_TEXTS,
    ),
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print JSON instead, with every text's timeline.")
]


@dataclass(frozen=True)
class _Load:
    """How texts are asked for."""

    warm_up: int
    concurrency: int
    rate: float | None
    seed: int
    timeout_s: float

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} a second"
        return f"{self.concurrency} at a time"


def bench(
    address: AddressOption = DEFAULT_ADDRESS,
    texts: _Texts = 32,
    concurrency: _Concurrency = 1,
    rate: _Rate = None,
    warm_up: _WarmUp = 2,
    timeout: _Timeout = 600.0,
    prompt: _Prompt = None,
    max_new_tokens: _MaxNewTokens = 128,
    temperature: _Temperature = 1.0,
    seed: _Seed = 0,
    verifier: _Verifier = None,
    gamma: _Gamma = None,
    json: _Json = False,
) -> None:
    """Load running services and report rates and latencies.

    Times to the first token (TTFT) and latencies count from when a text was due.
    TPOT is (latency - TTFT) / (tokens - 1).
    ITL is the raw gap between messages, each with all tokens of a round.
    A round runs from asking for the draft to holding the verdict, as the
    orchestrator timed it; without drafts it is the gap.
    Beside the models is a round less its forward passes.
    """
    from tandem.common.v1 import common_pb2
    from tandem.load.prompts import PROMPTS
    from tandem.orchestrator.v1 import orchestrator_pb2 as pb

    prompts = prompt or PROMPTS
    with reported():
        try:
            generations = [
                pb.Generation(
                    prompt=prompts[number % len(prompts)],
                    sampling=common_pb2.Sampling(temperature=temperature, seed=seed + number),
                    stopping=pb.Stopping(max_new_tokens=max_new_tokens, ignore_eos=True),
                    speculation=pb.Speculation(verifier=verifier, gamma=gamma),
                )
                for number in range(texts + warm_up)
            ]
        except ValueError as error:
            raise Misconfigured(f"a number is out of range: {error}") from None
        load = _Load(warm_up, concurrency, rate, seed, timeout)
        timelines = _run(address, generations, load)
        _report(timelines, f"{texts} texts of {max_new_tokens} tokens, {load}", json)


def _run(address: str, generations: list[pb.Generation], load: _Load) -> list[Timeline]:
    """Warm up, then the load, with its progress on standard error."""
    import asyncio

    from rich.progress import Progress

    from tandem.load.client import Client
    from tandem.load.generator import LoadGenerator

    warm_up, counted = generations[: load.warm_up], generations[load.warm_up :]

    async def run(tick: Callable[[], None]) -> list[Timeline]:
        async with LoadGenerator(address, load.timeout_s) as generator:
            await generator.closed_loop(warm_up, load.concurrency)
            if load.rate is None:
                return await generator.closed_loop(counted, load.concurrency, tick)
            return await generator.open_loop(counted, load.rate, load.seed, tick)

    with Client(address) as client:
        client.info()
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("texts", total=len(counted))
        return asyncio.run(run(lambda: progress.advance(task)))


def _report(timelines: list[Timeline], title: str, as_json: bool) -> None:
    """Print the figures.

    Raises:
        Failure: no text was finished.
    """
    import json

    from tandem.load.report import LoadReport

    report = LoadReport.of(timelines)
    if as_json:
        raw = [
            {
                "intended_s": text.intended_s,
                "asked_s": text.asked_s,
                "arrivals": text.arrivals,
                "ended_s": text.ended_s,
                "error": text.error,
            }
            for text in timelines
        ]
        write_exactly(json.dumps({**report.as_json(), "timelines": raw}, indent=2) + "\n")
    else:
        out.print(title)
        for table in report.tables():
            out.print(table)
        for line in report.failures():
            out.out(line, highlight=False)
    if not report.texts:
        raise Failure(f"every text failed: {next(iter(report.errors))}")
