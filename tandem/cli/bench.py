"""tandem bench: load on running services, and what it did to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.exit_codes import reported
from tandem.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    SloLatencyOption,
    SloShareOption,
    SloTpotOption,
    SloTtftOption,
)
from tandem.cli.terminal import err, tell
from tandem.failure import Misconfigured

if TYPE_CHECKING:
    from tandem.load.objective import Objective
    from tandem.load.sweep import Level
    from tandem.load.timeline import Timeline
    from tandem.orchestrator.v1 import orchestrator_pb2 as pb

_LOAD = "Load"
_TEXTS = "Texts"

_Texts = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Texts. Default 32.", rich_help_panel=_LOAD),
]
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
_MaxInFlight = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        help="Open loop: texts on their way at once; one more waits, and its times count on.",
        rich_help_panel=_LOAD,
    ),
]
_Sweep = Annotated[
    bool,
    typer.Option(
        "--sweep",
        help="Open loop at one rate after the other, from --rate (default 1): find the highest"
        " that holds the objective.",
        rich_help_panel=_LOAD,
    ),
]
_Seconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=1,
        help="With --sweep: how long texts are asked for at each rate. Default 20.",
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
_Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        dir_okay=False,
        help="Requests to ask for in turn instead, as ghz reads them: deploy/ghz/prompts.json.",
        rich_help_panel=_TEXTS,
    ),
]
_MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        "-n",
        metavar="N",
        min=1,
        help="Tokens of every text: the model's end of text is ignored. Default 128.",
        rich_help_panel=_TEXTS,
    ),
]
_Temperature = Annotated[
    float | None,
    typer.Option(metavar="X", min=0, help="Of every text. Default 1.", rich_help_panel=_TEXTS),
]
_Seed = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        max=(1 << 63) - 1,
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
    max_in_flight: int
    seed: int
    timeout_s: float

    def __str__(self) -> str:
        if self.rate is not None:
            return f"{self.rate:.4g} a second"
        return f"{self.concurrency} at a time"


def bench(
    address: AddressOption = DEFAULT_ADDRESS,
    texts: _Texts = None,
    concurrency: _Concurrency = 1,
    rate: _Rate = None,
    max_in_flight: _MaxInFlight = 2048,
    sweep: _Sweep = False,
    seconds: _Seconds = None,
    warm_up: _WarmUp = 2,
    timeout: _Timeout = 600.0,
    prompt: _Prompt = None,
    data: _Data = None,
    max_new_tokens: _MaxNewTokens = None,
    temperature: _Temperature = None,
    seed: _Seed = 0,
    verifier: _Verifier = None,
    gamma: _Gamma = None,
    slo_ttft_ms: SloTtftOption = 1000.0,
    slo_tpot_ms: SloTpotOption = 100.0,
    slo_latency_ms: SloLatencyOption = 0.0,
    slo_share: SloShareOption = 0.99,
    json: _Json = False,
) -> None:
    """Load running services and report rates and latencies.

    Times to the first token (TTFT) and latencies count from when a text was due.
    TPOT is (latency - TTFT) / (tokens - 1).
    ITL is the raw gap between messages, each with all tokens of a round.
    A round runs from asking for the draft to holding the verdict, as the
    orchestrator timed it; without drafts it is the gap.
    Beside the models is a round less its forward passes.
    Goodput is of texts that keep the objective.
    """
    from tandem.cli.bench_report import report, report_sweep
    from tandem.load.objective import Objective
    from tandem.load.requests import requests
    from tandem.load.sweep import require_rate

    with reported():
        load = _Load(warm_up, concurrency, rate, max_in_flight, seed, timeout)
        request = requests(
            data, prompt, max_new_tokens, temperature, seed, verifier=verifier, gamma=gamma
        )
        objective = Objective(
            slo_ttft_ms or None, slo_tpot_ms or None, slo_latency_ms or None, slo_share
        )
        if sweep:
            if texts is not None:
                raise Misconfigured("--sweep takes --seconds instead of --texts")
            require_rate(rate or 1.0, seconds or 20.0)
            levels = _sweep(address, request, load, objective, seconds or 20.0)
            report_sweep(levels, objective, json)
            return
        if seconds is not None:
            raise Misconfigured("--seconds is for --sweep; give --texts here")
        count = texts or 32
        generations = [request(number) for number in range(count + warm_up)]
        timelines = _run(address, generations, load)
        report(timelines, f"{count} texts, {load}", objective, json)


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
            return await generator.open_loop(
                counted, load.rate, load.seed, tick, load.max_in_flight
            )

    with Client(address) as client:
        client.info()
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("texts", total=len(counted))
        return asyncio.run(run(lambda: progress.advance(task)))


def _sweep(
    address: str,
    request: Callable[[int], pb.Generation],
    load: _Load,
    objective: Objective,
    seconds: float,
) -> list[Level]:
    """Warm up, then one rate after the other."""
    import asyncio

    from tandem.load.client import Client
    from tandem.load.generator import LoadGenerator
    from tandem.load.sweep import OpenLoop, sweep

    async def run() -> list[Level]:
        async with LoadGenerator(address, load.timeout_s) as generator:
            warm_up = [request(number) for number in range(load.warm_up)]
            await generator.closed_loop(warm_up, load.concurrency)
            loop = OpenLoop(generator, request, seconds, objective, load.seed, load.max_in_flight)
            return await sweep(loop.level, load.rate or 1.0, loop.lowest, loop.highest, tell)

    with Client(address) as client:
        client.info()
    return asyncio.run(run())
