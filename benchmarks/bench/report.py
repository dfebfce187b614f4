"""The headline table of a run, and what the bare models take."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from benchmarks.bench.floor import Floor
from benchmarks.bench.row import Row
from benchmarks.peers.roster import TRANSFORMERS

_COLUMNS = (
    "temper-\nature",
    "method",
    "gamma",
    "tokens\n/s",
    "TTFT\nms",
    "TPOT\nms",
    "round\np50 ms",
    "\np95",
    "\np99",
    "beside\np50 ms",
    "target\ncalls",
    "accep-\ntance",
    "block\nefficiency",
    "bytes/\ntoken",
    "to\nplain",
    "pre-\ndicted",
    "to\nfloor",
)


def best(rows: Sequence[Row], name: str, temperature: float) -> Row | None:
    """The fastest row of a method at a temperature."""
    mine = [row for row in rows if row.name == name and row.temperature == temperature]
    return max(mine, key=lambda row: row.tokens_per_s, default=None)


def shown(rows: Sequence[Row]) -> list[Row]:
    """The rows of the table: transformers at its best only, all of the others."""
    kept = []
    for row in rows:
        if not row.name.startswith(TRANSFORMERS.name) or row is best(
            rows, row.name, row.temperature
        ):
            kept.append(row)
    return kept


def table(rows: Sequence[Row]) -> Table:
    """The headline table."""
    result = Table(*_COLUMNS)
    for column in result.columns[2:]:
        column.justify = "right"
    previous = None
    for row in shown(rows):
        if previous is not None and row.temperature != previous:
            result.add_section()
        previous = row.temperature
        result.add_row(f"{row.temperature:g}", row.name, *_cells(row))
    return result


def _cells(row: Row) -> list[str]:
    times, beside = row.round, row.beside_models
    efficiency = _number(row.block_efficiency, 2)
    if row.block_efficiency_se is not None:
        efficiency += f" ± {row.block_efficiency_se:.2f}"
    return [
        str(row.gamma),
        _number(row.tokens_per_s, 1),
        _number(row.ttft_ms, 1),
        _number(row.tpot_ms, 1),
        _number(times.p50 if times else None, 1),
        _number(times.p95 if times else None, 1),
        _number(times.p99 if times else None, 1),
        _number(beside.p50 if beside else None, 2),
        _number(row.target_calls, 1),
        _number(row.acceptance, 3),
        efficiency,
        _number(row.bytes_per_token, 0),
        _number(row.to_plain, 2),
        _number(row.predicted_to_plain, 2),
        _number(row.round_to_floor, 2),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def sentences(floor: Floor) -> list[str]:
    """What the bare models take, in words."""
    said = []
    plain = median(floor.rounds[0].target_s)
    for gamma, times in floor.rounds.items():
        if gamma:
            pass_s = median(times.target_s)
            said.append(
                f"gamma {gamma}, bare: draft step {median(times.draft_s) / gamma * 1e3:.2f} ms,"
                f" target pass of {gamma + 1} rows {pass_s * 1e3:.1f} ms,"
                f" {pass_s / plain:.2f} x the pass of 1 row ({plain * 1e3:.1f} ms)"
            )
    read_ms = floor.target_bytes / floor.bandwidth * 1e3
    said.append(
        f"target weights {floor.target_bytes / 1e6:.0f} MB ({floor.dtype}) at"
        f" {floor.bandwidth / 1e9:.1f} GB/s copied: {read_ms:.1f} ms a pass"
    )
    return said
