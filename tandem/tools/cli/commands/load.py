"""tandem load: ghz on the public calls, and the services' metrics during the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.failure import Misconfigured
from tandem.tools.cli.display.terminal import err, tell
from tandem.tools.cli.exit_codes import reported, so_far
from tandem.tools.cli.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    SloLatencyOption,
    SloShareOption,
    SloTpotOption,
    SloTtftOption,
)
from tandem.tools.cli.security import Security, secured

if TYPE_CHECKING:
    from tandem.orchestrator.v1 import orchestrator_pb2 as pb
    from tandem.rpc.endpoint import Endpoint
    from tandem.tools.load.ghz.outcome import Outcome
    from tandem.tools.load.ghz.scenario import Scenario
    from tandem.tools.load.objective import Objective
    from tandem.tools.load.sweep import Level

_RUNNING = "Running"
# Texts before the first scenario, if the services are our own.
_WARM_UP = 16

_Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SCENARIO]...", help="Configurations, without .json. Default: all of the folder."
    ),
]
_Configs = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        file_okay=False,
        help="ghz's configurations. Default: deploy/ghz of the checkout.",
        rich_help_panel=_RUNNING,
    ),
]
_Metrics = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Metrics endpoints of the running services. Repeatable. Default: the environment's"
        " TANDEM_*_METRICS_LISTEN.",
        rich_help_panel=_RUNNING,
    ),
]
_Flags = Annotated[
    list[str] | None,
    typer.Option(
        "--ghz",
        metavar="NAME=VALUE",
        help="Override a setting of all configurations by ghz's flag: total=50. Repeatable.",
        rich_help_panel=_RUNNING,
    ),
]
_Sweep = Annotated[
    bool,
    typer.Option(
        help="Find the highest rate that holds the objective, with Tandem's own client: ghz takes"
        " integer rates only, and does not time a stream's first token.",
        rich_help_panel=_RUNNING,
    ),
]
_Rate = Annotated[
    float,
    typer.Option(metavar="X", min=1e-3, help="First rate of the sweep.", rich_help_panel=_RUNNING),
]
_Seconds = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", min=1, help="Length of each rate's run.", rich_help_panel=_RUNNING
    ),
]
_Out = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        file_okay=False,
        help="Folder for report.html, report.md, report.json and ghz's own JSON.",
    ),
]
_Results = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        dir_okay=False,
        help="Check the JSON of a ghz run elsewhere, such as in a Job; run nothing. Repeatable.",
    ),
]


@dataclass(frozen=True)
class _Wanted:
    """What to run."""

    scenarios: Sequence[Scenario]
    sweep: bool
    rate: float
    seconds: float
    flags: dict[str, str]


@secured
def load(
    security: Security,
    names: _Names = None,
    address: AddressOption = DEFAULT_ADDRESS,
    configs: _Configs = None,
    metrics: _Metrics = None,
    ghz: _Flags = None,
    sweep: _Sweep = True,
    rate: _Rate = 2.0,
    seconds: _Seconds = 20.0,
    slo_ttft_ms: SloTtftOption = 1000.0,
    slo_tpot_ms: SloTpotOption = 100.0,
    slo_latency_ms: SloLatencyOption = 0.0,
    slo_share: SloShareOption = 0.99,
    out_dir: _Out = Path("out/load"),
    results: _Results = None,
) -> None:
    """Load the public calls with ghz, and report the results of clients and services.

    Starts the embedded pair if no orchestrator answers. Exit code 1 means that
    calls failed, that sequences were left open, or that no rate held the objective;
    the report is written in any case.
    """
    from tandem.tools.cli.display.load import finish, require
    from tandem.tools.load.objective import Objective

    with reported():
        objective = Objective.of(slo_ttft_ms, slo_tpot_ms, slo_latency_ms, slo_share)
        if results:
            if names or ghz or metrics or configs:
                raise Misconfigured("--results runs nothing: leave the other arguments out")
            outcomes = _judged(results)
            require(out_dir)
            finish(outcomes, [], objective, None, out_dir)
            return
        wanted = _wanted(names or [], configs, ghz or [], sweep, rate, seconds)
        require(out_dir)
        _run(wanted, security.at(address), metrics, objective, out_dir)


def _judged(results: Sequence[Path]) -> list[Outcome]:
    from tandem.tools.load.ghz.calls import read
    from tandem.tools.load.ghz.outcome import Outcome

    return [Outcome(name, "ran elsewhere", calls) for name, calls in map(read, results)]


def _wanted(
    names: Sequence[str],
    configs: Path | None,
    flags: Sequence[str],
    sweep: bool,
    rate: float,
    seconds: float,
) -> _Wanted:
    from tandem.tools.load.ghz.scenario import scenarios
    from tandem.tools.load.sweep import require_rate
    from tandem.tools.local.process import ROOT

    given = {}
    for flag in flags:
        name, separator, value = flag.partition("=")
        if not name or not separator:
            raise Misconfigured(f"--ghz {flag!r} is not NAME=VALUE")
        given[name] = value
    if sweep:
        require_rate(rate, seconds)
    folder = configs or ROOT / "deploy" / "ghz"
    chosen = [scenario.under(given) for scenario in scenarios(folder, names)]
    return _Wanted(chosen, sweep, rate, seconds, given)


def _run(
    wanted: _Wanted,
    endpoint: Endpoint,
    metrics: Sequence[str] | None,
    objective: Objective,
    folder: Path,
) -> None:
    import asyncio

    from tandem.tools.cli.display.load import finish
    from tandem.tools.cli.load_services import services
    from tandem.tools.load.ghz import tool
    from tandem.tools.load.ghz.campaign import Campaign
    from tandem.tools.load.ghz.served import Watch
    from tandem.tools.local.process import ROOT

    ghz = tool.find(ROOT)
    request = _requests(wanted) if wanted.sweep else None
    cuts = any(scenario.cuts for scenario in wanted.scenarios)
    outcomes: list[Outcome] = []
    levels: list[Level] = []
    interrupted = False
    with services(endpoint.address, metrics, cuts, folder / "logs") as (endpoints, are_ours):
        watch = Watch(endpoints) if endpoints else None
        if watch is not None:
            watch.require()
        campaign = Campaign(ghz, endpoint, watch, folder, wanted.flags)
        try:
            if are_ours:
                asyncio.run(_warm_up(endpoint))
            for scenario in wanted.scenarios:
                with err.status(f"{scenario.name}: {scenario.loop}"):
                    outcomes.append(campaign.run(scenario))
                tell(outcomes[-1])
            if request:
                asyncio.run(_sweep(wanted, endpoint, request, objective, levels))
        except KeyboardInterrupt:
            if not outcomes:
                raise
            interrupted = True
            tell(f"interrupted: the report is of {_done(outcomes, levels)}. Ctrl-C again stops")
    with so_far(interrupted):
        finish(outcomes, levels, objective, endpoint.address, folder)


def _done(outcomes: Sequence[Outcome], levels: Sequence[Level]) -> str:
    rates = f" and {len(levels)} rates of the sweep" if levels else ""
    return f"{len(outcomes)} loads{rates}"


def _requests(wanted: _Wanted) -> Callable[[int], pb.Generation]:
    """A function from a number to a request of the first scenario's data file.

    Raises:
        Misconfigured: the scenario names no file, or the file is no list of requests.
    """
    from tandem.tools.load.requests import RequestFile

    first = wanted.scenarios[0]
    if not (name := first.config.get("data-file")):
        raise Misconfigured(
            f"{first.name} has no data-file, and the sweep takes its requests from there; leave it"
            " out with --no-sweep"
        )
    return RequestFile(first.path.parent / str(name)).generation


async def _warm_up(endpoint: Endpoint) -> None:
    """Warm up: freshly started services create some things at their first use."""
    from tandem.tools.load.generator import LoadGenerator
    from tandem.tools.load.requests import requests

    request = requests(None, None, None, None, 0, pb.Speculation())
    async with LoadGenerator(endpoint) as generator:
        await generator.closed_loop([request(number) for number in range(_WARM_UP)], _WARM_UP // 2)


async def _sweep(
    wanted: _Wanted,
    endpoint: Endpoint,
    request: Callable[[int], pb.Generation],
    objective: Objective,
    levels: list[Level],
) -> None:
    """Find the highest rate. Each rate is added to `levels` as soon as it has run."""
    from tandem.tools.load.generator import LoadGenerator
    from tandem.tools.load.sweep import OpenLoop, sweep

    def ended(level: Level) -> None:
        levels.append(level)
        tell(level)

    async with LoadGenerator(endpoint) as generator:
        loop = OpenLoop(generator, request, wanted.seconds, objective)
        await sweep(loop.level, wanted.rate, loop.lowest, loop.highest, ended)
