"""What mutual TLS costs a round: the same services without it and with it, in turn.

    python -m benchmarks.transport [--texts 1 16] [--repeats 5]

The pair is that of `benchmarks.overhead`, nearly free, so that what is added is a large share of
what is left: of a real pair's round it is a small one. With TLS every hop has it, the one of the
client too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.measure.environment import RESULTS, describe
from benchmarks.overhead import SERVICES, Cost, measure, save_pair
from tandem.rpc.endpoint import Endpoint
from tandem.tools.local.stack import StackSettings, running
from tests.support.processes.authorities import Authority

_GAMMA = 4
_WAYS = ("plaintext", "mutual TLS")
# Texts of each client in one measurement, and of all at least.
_PER_CLIENT = 2
_TEXTS = 8


def _settings(models: Mapping[str, Path], authority: Authority | None) -> dict[str, dict[str, str]]:
    """Of the three services; with an authority, by mutual TLS."""
    services: dict[str, dict[str, str]] = {
        name: {"MODEL": str(model), "MAX_LENGTH": "512"} for name, model in models.items()
    }
    services["orchestrator"] = {}
    for name, settings in services.items():
        settings |= {"LISTEN": "127.0.0.1:0", "DRAIN_SECONDS": "0"}
        if authority is not None:
            pair = authority.sign(name)
            settings |= {"TLS_CERT": str(pair.cert), "TLS_KEY": str(pair.key)}
            settings |= {"TLS_CLIENT_CA": str(authority.cert)}
    if authority is not None:
        own = services["orchestrator"]
        own |= {"PEER_CA": str(authority.cert), "PEER_CERT": own["TLS_CERT"]}
        own |= {"PEER_KEY": own["TLS_KEY"]}
        client = authority.sign("client")
        os.environ |= {
            "TANDEM_CA": str(authority.cert),
            "TANDEM_CERT": str(client.cert),
            "TANDEM_KEY": str(client.key),
        }
    return services


@contextmanager
def _serving(
    settings: Mapping[str, Mapping[str, str]],
) -> Iterator[tuple[Endpoint, dict[str, int]]]:
    with running(StackSettings(settings)) as stack:
        ids = {name: process.id for name, process in stack.processes.items()}
        yield stack.endpoint("orchestrator"), ids


def _table(found: Sequence[tuple[str, Cost]]) -> Table:
    names = [f"{name}, µs" for name in SERVICES]
    table = Table("", "texts", *names, "sum, µs", "rounds/s", "beside, ms", title="Medians")
    for texts in sorted({cost.texts for _, cost in found}):
        sums = {}
        for way in _WAYS:
            costs = [cost for name, cost in found if (name, cost.texts) == (way, texts)]
            sums[way] = [
                *(median(cost.cpu_us[name] for cost in costs) for name in SERVICES),
                median(cost.total_us for cost in costs),
                median(cost.rounds_per_s for cost in costs),
                median(cost.beside_ms for cost in costs),
            ]
            *whole, beside = sums[way]
            table.add_row(way, str(texts), *(f"{value:,.0f}" for value in whole), f"{beside:.2f}")
        ratios = [ours / theirs for theirs, ours in zip(*sums.values(), strict=True)]
        table.add_row("ratio", str(texts), *(f"{ratio:.2f}" for ratio in ratios))
    return table


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=5, help="of the whole, in turn")
    parser.add_argument("--out", type=Path, default=RESULTS / "transport.json")
    options = parser.parse_args()
    found: list[tuple[str, Cost]] = []
    with tempfile.TemporaryDirectory() as scratch:
        models = save_pair(Path(scratch))
        authority = Authority(Path(scratch))
        with ExitStack() as stacks:
            # Both are there all the time; the one that is not measured has nothing to do.
            served = {
                way: stacks.enter_context(_serving(_settings(models, secure)))
                for way, secure in zip(_WAYS, (None, authority), strict=True)
            }
            for _ in range(options.repeats):
                for texts in options.texts:
                    for way, (place, ids) in served.items():
                        count = max(_PER_CLIENT, _TEXTS // texts)
                        cost = asyncio.run(measure(place, ids, texts, _GAMMA, count))
                        found.append((way, cost))
    Console(width=110).print(_table(found))
    rows = [{"way": way, **asdict(cost)} for way, cost in found]
    options.out.write_text(json.dumps({**describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
