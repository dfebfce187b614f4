"""tandem plan: how many replicas a load needs, from measurements."""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.failure import Misconfigured
from tandem.tools.cli.display.terminal import err, out, write_exactly
from tandem.tools.cli.exit_codes import reported
from tandem.tools.cli.options import SloLatencyOption, SloShareOption, SloTpotOption, SloTtftOption

if TYPE_CHECKING:
    from tandem.tools.planning.measured.measurement import Measurement
    from tandem.tools.planning.plan import Plan
    from tandem.tools.planning.prediction import LoadPrediction
    from tandem.tools.planning.simulation.rounds import Fleet
    from tandem.tools.planning.sizing import SizedFleet

    _Cell = Callable[[SizedFleet], str]

_NEED = "Demand"
_FLEET = "Replicas"
_MEMORY = "Memory of the KV cache"

_Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SOURCE...",
        help="The JSON of one `tandem bench --json`; or traces, as `tandem trace` reads them.",
    ),
]
_Rate = Annotated[
    float | None,
    typer.Option(metavar="X", min=1e-3, help="Texts a second.", rich_help_panel=_NEED),
]
_Gamma = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        max=64,
        help="Draft length. Default: the cheapest of a few likely ones.",
        rich_help_panel=_FLEET,
    ),
]
_Slots = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        max=1024,
        help="Sequences that a target holds: its MAX_SEQUENCES.",
        rich_help_panel=_FLEET,
    ),
]
_Price = Annotated[
    float,
    typer.Option(metavar="X", min=0, help="Price of a replica per hour.", rich_help_panel=_FLEET),
]
_Gpus = Annotated[
    int, typer.Option(metavar="N", min=0, help="GPUs of a replica.", rich_help_panel=_FLEET)
]
_Targets = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=64,
        help="Predict the figures of this many targets instead of sizing.",
        rich_help_panel=_FLEET,
    ),
]
_Drafters = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, max=64, help="With --targets: drafters.", rich_help_panel=_FLEET
    ),
]
_Clients = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=4096,
        help="With --targets: clients that send the next request after each answer.",
        rich_help_panel=_FLEET,
    ),
]
_Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="CHECKPOINT",
        help="Print what a text takes in this model's KV cache; for targets and drafters. No"
        " SOURCE is needed.",
        rich_help_panel=_MEMORY,
    ),
]
_Length = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="With --model: tokens of a text. Default: the model's longest.",
        rich_help_panel=_MEMORY,
    ),
]
_Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="With --model: of the services. Default: the checkpoint's; on a CPU it is float32"
        " unless DTYPE says otherwise.",
        rich_help_panel=_MEMORY,
    ),
]
_Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the simulation.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def plan(
    sources: _Sources = None,
    rate: _Rate = None,
    slo_ttft_ms: SloTtftOption = 1000.0,
    slo_tpot_ms: SloTpotOption = 100.0,
    slo_latency_ms: SloLatencyOption = 0.0,
    slo_share: SloShareOption = 0.99,
    gamma: _Gamma = None,
    slots: _Slots = 64,
    price_target: _Price = 0.0,
    price_drafter: _Price = 0.0,
    gpus_target: _Gpus = 1,
    gpus_drafter: _Gpus = 1,
    targets: _Targets = None,
    drafters: _Drafters = 1,
    clients: _Clients = None,
    model: _Models = None,
    length: _Length = None,
    dtype: _Dtype = None,
    seed: _Seed = 0,
    json: _Json = False,
) -> None:
    """Compute how many replicas meet an objective at a rate, their limits and their cost.

    Queues are simulated with the measured times, acceptance and texts. With --targets,
    predict the figures of that many replicas at a --rate or with --clients. With --model,
    compute what texts of a length take in its KV cache.
    """
    from tandem.tools.load.objective import Objective
    from tandem.tools.planning.plan import Prices, planned
    from tandem.tools.planning.simulation.rounds import Fleet
    from tandem.tools.planning.sizing import Need

    with reported():
        if model and (sources or rate is not None or targets is not None):
            raise Misconfigured("--model goes with --length, --dtype and --slots alone")
        if model:
            _print_memory(model, length, dtype, slots, json)
            return
        if not sources:
            raise Misconfigured("name a SOURCE: the JSON of `tandem bench --json`, or traces")
        if length is not None or dtype is not None:
            raise Misconfigured("--length and --dtype go with --model")
        if targets is None and rate is None:
            raise Misconfigured("say how many texts a second: --rate")
        if rate is not None and not math.isfinite(rate):
            raise Misconfigured("--rate must be a finite number of texts a second")
        if targets is None and clients is not None:
            raise Misconfigured("--clients goes with --targets")
        objective = Objective.of(slo_ttft_ms, slo_tpot_ms, slo_latency_ms, slo_share)
        measured = _measured(sources)
        if gamma is not None and gamma > len(measured.shares):
            raise Misconfigured(f"--gamma is at most {len(measured.shares)} here")
        if targets is not None:
            length = measured.gamma if gamma is None else gamma
            fleet = Fleet(targets, drafters if length else 0, length, slots)
            _print_prediction(_predicted(measured, fleet, rate, clients, seed), json)
            return
        assert rate is not None
        prices = Prices(price_target, price_drafter, gpus_target, gpus_drafter)
        need = Need(rate, objective, slots, seed=seed)
        with err.status("simulating"):
            made = planned(measured, need, prices, gamma)
        if json:
            write_exactly(json_module.dumps(made.as_json(), indent=2) + "\n")
        else:
            _print(made)


def _print_memory(
    models: Sequence[str], length: int | None, dtype: str | None, slots: int, as_json: bool
) -> None:
    """What texts of a length take in each model's cache."""
    from rich.table import Table

    from tandem.checkpoint_memory import memory_of

    found = []
    for name in models:
        memory = memory_of(name, dtype)
        tokens = length or memory.longest
        if not tokens:
            raise Misconfigured(f"{name} does not say how long its texts may be: give --length")
        if memory.longest and tokens > memory.longest:
            raise Misconfigured(f"--length {tokens}: {name} holds {memory.longest} tokens")
        found.append(
            {
                "model": memory.model,
                "dtype": memory.dtype,
                "tokens": tokens,
                "bytes_a_token": memory.bytes_a_token,
                "bytes_a_text": tokens * memory.bytes_a_token,
                "bytes_in_huge_pages": memory.in_pages(tokens),
                "bytes_of_all": slots * tokens * memory.bytes_a_token,
            }
        )
    if as_json:
        write_exactly(json_module.dumps(found, indent=2) + "\n")
        return
    table = Table("model", "dtype", "tokens", "a token", "a text", "in pages*", f"{slots} texts")
    for each in found:
        names = ("bytes_a_token", "bytes_a_text", "bytes_in_huge_pages", "bytes_of_all")
        sizes = (each[name] for name in names)
        plain = (str(each[name]) for name in ("model", "dtype", "tokens"))
        table.add_row(*plain, *(_size(int(str(size))) for size in sizes))
    out.print(table)
    out.print("* of 2 MiB, in which memory comes on a CPU", style="dim")


def _size(count: int) -> str:
    """Bytes as people read them."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << power:
            return f"{count / (1 << power):.2f} {unit}"
    return f"{count / 1024:.1f} KiB"


def _measured(sources: Sequence[str]) -> Measurement:
    from tandem.tools.cli.commands.trace import recording_of
    from tandem.tools.planning.measured import benched, recorded

    paths = [Path(source) for source in sources]
    if any(map(benched.is_bench, paths)):
        if len(paths) > 1:
            raise Misconfigured("one JSON of `tandem bench` at a time, and no traces with it")
        return benched.measured_from(benched.read(paths[0]))
    return recorded.measured_from(recording_of(sources))


def _predicted(
    measured: Measurement,
    fleet: Fleet,
    rate: float | None,
    clients: int | None,
    seed: int,
) -> LoadPrediction:
    """The performance of a fleet, simulated round by round."""
    from tandem.tools.planning.prediction import predicted
    from tandem.tools.planning.simulation.rounds import OfferedLoad

    if (rate is None) == (clients is None):
        raise Misconfigured("--targets goes with either --rate or --clients")
    with err.status("simulating"):
        return predicted(measured, fleet, OfferedLoad(0, rate or 0.0, clients or 0, seed))


def _print_prediction(found: LoadPrediction, as_json: bool) -> None:
    from rich.table import Table

    if as_json:
        write_exactly(json_module.dumps(found.as_json(), indent=2) + "\n")
        return
    table = Table("", "", show_header=False)
    for name, value in found.as_json().items():
        if not isinstance(value, bool | dict):
            table.add_row(name.replace("_", " "), f"{value:.4g}")
    out.print(table)
    if found.grows:
        out.print(
            f"The queue grows without end: {found.rate:g} texts a second are asked for, and"
            f" {found.texts_per_s:.4g} served. Times are those of the first {found.texts} texts."
        )
    out.print(f"Simulated: {found.texts} texts on {found.targets} of {found.of} targets.")


def _print(made: Plan) -> None:
    from rich.table import Table

    need, fleet = made.need, made.fleet
    table = Table("", "with drafts" if fleet.gamma else "planned", "without drafts")
    table.columns[1].justify = table.columns[2].justify = "right"
    columns = [fleet, made.plain]
    for name, of in _rows(made):
        cells = ["-" if sized is None else of(sized) for sized in columns]
        table.add_row(name, *cells)
    out.print(f"{need.rate:g} texts a second; good: {need.objective}")
    out.print(table)
    if made.speed_up is not None:
        out.print(f"A text is written {made.speed_up:.2f} times as fast as without drafts.")
    if made.is_cheaper_plain:
        out.print("Without drafts the same load costs less.")
    used = [f"{name} {share:.0%}" for name, share in fleet.busy.items()]
    out.print(f"Bound by {fleet.bound}. In use: {', '.join(used)}.")
    out.print(f"Simulated: {_simulated(fleet)}.")
    for note in made.notes:
        out.print(f"Assumed: {note}.")


def _simulated(sized: SizedFleet) -> str:
    share = "all" if sized.simulated == sized.targets else f"{sized.simulated} of the"
    return f"{sized.texts} texts on {share} {sized.targets} targets"


def _rows(made: Plan) -> list[tuple[str, _Cell]]:
    """The rows of the table: a name, and the function that gives a fleet's cell."""
    from tandem.tools.planning.plan import times

    def ends(name: str, digits: int = 0) -> _Cell:
        def cell(sized: SizedFleet) -> str:
            found = times(sized.served)
            return "/".join(f"{found[f'{name}_p{p}_ms']:.{digits}f}" for p in (50, 99))

        return cell

    def price(sized: SizedFleet) -> str:
        million = made.million_tokens(sized)
        return "-" if million is None else f"{million:.4g}"

    return [
        ("gamma", lambda sized: str(sized.gamma)),
        ("targets", lambda sized: str(sized.targets)),
        ("drafters", lambda sized: str(sized.drafters)),
        ("orchestrators", lambda sized: str(sized.orchestrators)),
        ("GPUs", lambda sized: str(made.gpus(sized))),
        ("price of a million tokens", price),
        ("tokens/s", lambda _: f"{made.tokens_per_s:.0f}"),
        ("TTFT p50/p99 ms", ends("ttft")),
        ("TPOT p50/p99 ms", ends("tpot", 1)),
        ("latency p50/p99 ms", ends("latency")),
        ("good texts", lambda sized: f"{sized.good:.1%}"),
    ]
