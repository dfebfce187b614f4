"""The headline table of a run, and the times of the bare models."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from benchmarks.bench.floor import Floor
from benchmarks.bench.row import Row
from benchmarks.measure.tables import table_of
from benchmarks.peers.roster import TRANSFORMERS


def best(rows: Sequence[Row], name: str, temperature: float) -> Row | None:
    """The fastest row of a method at a temperature."""
    mine = [row for row in rows if row.name == name and row.temperature == temperature]
    return max(mine, key=lambda row: row.tokens_per_s, default=None)


def shown(rows: Sequence[Row]) -> list[Row]:
    """The rows of the table: of transformers only the best, of the others all."""
    kept = []
    for row in rows:
        if not row.name.startswith(TRANSFORMERS.name) or row is best(
            rows, row.name, row.temperature
        ):
            kept.append(row)
    return kept


def table(rows: Sequence[Row]) -> Table:
    """The headline table."""
    return table_of(map(_cells, shown(rows)))


def _cells(row: Row) -> dict[str, object]:
    times, efficiency = row.round, _number(row.block_efficiency)
    if row.block_efficiency_se is not None:
        efficiency += f" ± {row.block_efficiency_se:.2f}"
    return {
        "temper-\nature": row.temperature,
        "method": row.name,
        "gamma": row.gamma,
        "tokens\n/s": row.tokens_per_s,
        "TTFT\nms": row.ttft_ms,
        "TPOT\nms": row.tpot_ms,
        "round\np50 ms": times and times.p50,
        "\np95": times and times.p95,
        "\np99": times and times.p99,
        "beside\np50 ms": row.beside_models and row.beside_models.p50,
        "target\ncalls": row.target_calls,
        "accep-\ntance": row.acceptance,
        "block\nefficiency": efficiency,
        "bytes/\ntoken": row.bytes_per_token,
        "to\nplain": row.to_plain,
        "pre-\ndicted": row.predicted_to_plain,
        "to\nfloor": row.round_to_floor,
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def sentence(floor: Floor) -> str:
    """A sentence on the times of the bare target."""
    read_ms = floor.target_bytes / floor.bandwidth * 1e3
    passes = ", ".join(
        f"{gamma + 1}: {median(times.target_s) * 1e3:.1f}" for gamma, times in floor.rounds.items()
    )
    return (
        f"bare target pass, ms by rows: {passes}; its {floor.target_bytes / 1e6:.0f} MB at"
        f" {floor.bandwidth / 1e9:.1f} GB/s copied take {read_ms:.1f} ms"
    )
