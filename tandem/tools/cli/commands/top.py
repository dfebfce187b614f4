"""tandem top: what running services do, second by second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.failure import Failure
from tandem.tools.cli.display.terminal import out, write_exactly
from tandem.tools.cli.exit_codes import reported
from tandem.tools.cli.metrics_addresses import endpoints_of

if TYPE_CHECKING:
    from rich.console import Group

    from tandem.tools.watch.figures import WatchedFigures
    from tandem.tools.watch.scrape import Scrape

_ANSWER_SECONDS = 2.0
# Rates are over this window: a text of some seconds records its stages only at its end.
_WINDOW_SECONDS = 10.0
# Least share of a step's time for a stage to be shown: smaller ones would only fill the screen.
_LEAST_SHARE = 0.01

_Endpoints = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[HOST:PORT]...",
        help="Metrics endpoints of the services. Default: the environment's"
        " TANDEM_*_METRICS_LISTEN, or those of `tandem up`.",
    ),
]
_Interval = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between updates.")
]
_Count = Annotated[
    int | None, typer.Option("--count", "-n", metavar="N", min=1, help="Updates before exit.")
]


def top(endpoints: _Endpoints = None, interval: _Interval = 1.0, count: _Count = None) -> None:
    """Show live metrics of running services: tokens, acceptance, sequences, KV cache, stages."""
    with reported():
        asked = endpoints_of(endpoints, usual=True)
        looks = _looks(asked, interval, count)
        if not out.is_terminal:
            for seen, away in looks:
                write_exactly(_line(seen, away) + "\n")
            return
        from rich.live import Live

        with Live(console=out, auto_refresh=False, screen=count is None) as live:
            for seen, away in looks:
                live.update(_screen(seen, away), refresh=True)


def _looks(
    endpoints: Sequence[str], interval: float, count: int | None
) -> Iterator[tuple[WatchedFigures, list[str]]]:
    """The figures of each update, and the endpoints that did not answer.

    Raises:
        Failure: no endpoint answers at the start.
    """
    from tandem.tools.watch.figures import figures

    kept: deque[Mapping[str, Scrape]] = deque(maxlen=round(_WINDOW_SECONDS / interval) or 1)
    with ThreadPoolExecutor(len(endpoints), thread_name_prefix="top") as threads:
        begun = time.monotonic()
        kept.append(_look(threads, endpoints))
        for number in range(1, (count or 1 << 62) + 1):
            # Wait for the clock, so that the time of a scrape does not add to the interval.
            time.sleep(max(begun + number * interval - time.monotonic(), 0.0))
            seen = _look(threads, endpoints, must=False)
            yield figures(kept[0], seen), [name for name in endpoints if name not in seen]
            kept.append(seen)


def _look(
    threads: ThreadPoolExecutor, endpoints: Sequence[str], must: bool = True
) -> dict[str, Scrape]:
    from tandem.tools.watch.scrape import scrape

    asked = {name: threads.submit(scrape, name, _ANSWER_SECONDS) for name in endpoints}
    seen: dict[str, Scrape] = {}
    failures: dict[str, Exception] = {}
    for name, answer in asked.items():
        try:
            seen[name] = answer.result()
        except (OSError, ValueError) as error:
            failures[name] = error
    if must and not seen:
        name, failure = next(iter(failures.items()))
        reason = (isinstance(failure, OSError) and failure.strerror) or failure
        raise Failure(f"no metrics at {name}: {reason}")
    return seen


def _line(seen: WatchedFigures, away: Sequence[str]) -> str:
    """The figures in a line, for a log."""
    parts = [
        f"{seen.tokens:.1f} tokens/s",
        f"{seen.rounds:.1f} rounds/s",
        f"acceptance {_share(seen.acceptance)}",
        f"block efficiency {_number(seen.block_efficiency)}",
        f"prompt cached {_share(seen.cached)}",
        f"{seen.requests:.1f} requests/s",
    ]
    if seen.failed:
        parts.append(f"{seen.failed:.1f} failed/s")
    for service in seen.services:
        own = f"{service.role} {service.open} open"
        if service.waiting:
            own += f" {service.waiting} waiting"
        if service.kv_share is not None:
            own += f" KV {_share(service.kv_share)} of {_share(service.promised)} promised"
        parts.append(own)
    parts += [f"{name} is away" for name in away]
    return "  ".join(parts)


def _screen(seen: WatchedFigures, away: Sequence[str]) -> Group:
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.table import Table

    rates = "requests/s", "failed/s"
    heads = "tokens/s", "rounds/s", "acceptance", "block efficiency", "prompt cached", *rates
    head = Table(*heads, box=SIMPLE)
    head.add_row(
        f"{seen.tokens:.1f}",
        f"{seen.rounds:.1f}",
        _share(seen.acceptance),
        _number(seen.block_efficiency),
        _share(seen.cached),
        f"{seen.requests:.1f}",
        f"{seen.failed:.1f}",
    )
    cache = "KV cache", "promised", "longest text"
    services = Table("service", "replicas", "open", "waiting", *cache, "a batch", box=SIMPLE)
    for service in seen.services:
        services.add_row(
            service.role,
            str(service.replicas),
            str(service.open),
            str(service.waiting),
            _share(service.kv_share),
            _share(service.promised),
            "-" if service.longest is None else str(service.longest),
            _number(service.batch),
        )
    stages = Table("stage", "each", "share", "", box=SIMPLE)
    for stage in seen.stages:
        if stage.share >= _LEAST_SHARE:
            bar = "█" * round(stage.share * 20)
            stages.add_row(stage.name, f"{stage.seconds * 1000:.2f} ms", _share(stage.share), bar)
    # Notes come first: a short screen cuts off the last stages.
    notes = [f"over the last {seen.seconds:.0f} s", *(f"{name} is away" for name in away)]
    return Group(*notes, head, services, stages)


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"
