"""tandem bench: load on running services, and what it did to them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from tandem.failure import Misconfigured
from tandem.tools.cli.exit_codes import reported, so_far
from tandem.tools.cli.options import (
    DEFAULT_ADDRESS,
    HTTP_ADDRESS,
    AddressOption,
    SloLatencyOption,
    SloShareOption,
    SloTpotOption,
    SloTtftOption,
)
from tandem.tools.cli.security import Security, secured
from tandem.tools.load.requests import MAX_IN_FLIGHT, MOST_IN_FLIGHT, MOST_TEXTS

_LOAD = "Load"
_TEXTS = "Texts"

_Texts = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=MOST_TEXTS,
        help="Number of texts. Default 32.",
        rich_help_panel=_LOAD,
    ),
]
_Concurrency = Annotated[
    int,
    typer.Option(
        "--concurrency",
        "-c",
        metavar="N",
        min=1,
        max=MOST_IN_FLIGHT,
        help="Closed loop: clients that send the next request after each answer.",
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
        max=MOST_IN_FLIGHT,
        help="Open loop: most texts in flight. Further texts wait, and their waiting counts.",
        rich_help_panel=_LOAD,
    ),
]
_Sweep = Annotated[
    bool,
    typer.Option(
        "--sweep",
        help="Run an open loop at one rate after the other, from --rate (default 1), to find the"
        " highest rate that holds the objective.",
        rich_help_panel=_LOAD,
    ),
]
_Seconds = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=1,
        help="With --sweep: how long each rate sends requests. Default 20.",
        rich_help_panel=_LOAD,
    ),
]
_WarmUp = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        max=MOST_TEXTS,
        help="Warm-up texts, which are not counted.",
        rich_help_panel=_LOAD,
    ),
]
_Timeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0, help="Time limit of each text.", rich_help_panel=_LOAD),
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
        help="Instead: take requests in turn from a file for ghz, like deploy/ghz/prompts.json.",
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
        max=(1 << 32) - 1,
        help="Length of every text; the model's end of text is ignored. Default 128.",
        rich_help_panel=_TEXTS,
    ),
]
_Temperature = Annotated[
    float | None,
    typer.Option(metavar="X", min=0, help="For every text. Default 1.", rich_help_panel=_TEXTS),
]
_Seed = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        max=(1 << 63) - 1,
        help="Seed of the open loop's arrivals and of the first text; each further text adds 1.",
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
        max=(1 << 32) - 1,
        help="Tokens to draft per round; 0 decodes plainly. Default: the orchestrator's.",
        rich_help_panel=_TEXTS,
    ),
]
_Http = Annotated[
    bool,
    typer.Option(
        "--http",
        help=f"Load OpenAI's HTTP API at the address, by default {HTTP_ADDRESS}, instead of gRPC.",
        rich_help_panel=_LOAD,
    ),
]
_Json = Annotated[
    bool, typer.Option("--json", help="Print JSON instead, with every text's timeline.")
]


@secured
def bench(
    security: Security,
    address: AddressOption = DEFAULT_ADDRESS,
    http: _Http = False,
    texts: _Texts = None,
    concurrency: _Concurrency = 1,
    rate: _Rate = None,
    max_in_flight: _MaxInFlight = MAX_IN_FLIGHT,
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
    ITL is the time between messages; a message has all tokens of a round.
    A round lasts from the request for the draft until the verdict has arrived,
    as timed by the orchestrator; without drafts it is the gap.
    "Beside the models" is a round's time minus its forward passes.
    Goodput counts the texts that meet the objective.
    """
    from tandem.orchestrator.v1 import orchestrator_pb2 as pb
    from tandem.tools.cli.bench_run import BenchLoad, run, run_sweep
    from tandem.tools.cli.display.bench import report, report_sweep
    from tandem.tools.load.objective import Objective
    from tandem.tools.load.requests import requests
    from tandem.tools.load.sweep import require_rate

    with reported():
        front = HTTP_ADDRESS if http and address == DEFAULT_ADDRESS else address
        place = security.at(front)
        load = BenchLoad(
            warm_up=warm_up,
            concurrency=concurrency,
            rate=rate,
            max_in_flight=max_in_flight,
            seed=seed,
            timeout_s=timeout,
            http=http,
        )
        speculation = pb.Speculation(verifier=verifier, gamma=gamma)
        request = requests(data, prompt, max_new_tokens, temperature, seed, speculation)
        objective = Objective.of(slo_ttft_ms, slo_tpot_ms, slo_latency_ms, slo_share)
        if rate is not None and not math.isfinite(rate):
            raise Misconfigured("--rate must be a finite number of texts a second")
        if sweep:
            if texts is not None:
                raise Misconfigured("--sweep takes --seconds instead of --texts")
            require_rate(rate or 1.0, seconds or 20.0)
            levels, interrupted = run_sweep(place, request, load, objective, seconds or 20.0)
            with so_far(interrupted):
                report_sweep(levels, objective, json)
            return
        if seconds is not None:
            raise Misconfigured("--seconds is for --sweep; give --texts here")
        count = texts or 32
        generations = [request(number) for number in range(count + warm_up)]
        timelines, interrupted = run(place, generations, load)
        with so_far(interrupted):
            report(timelines, f"{len(timelines)} texts, {load}", objective, json)
