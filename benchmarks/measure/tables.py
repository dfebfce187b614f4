"""Findings as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table


def table_of(rows: Iterable[Mapping[str, object]], title: str | None = None) -> Table:
    """A table of rows; the first row's keys are the heads. Numbers are rounded, None is "-"."""
    table = Table(title=title)
    for row in rows:
        if not table.columns:
            for name, value in row.items():
                words = isinstance(value, str)
                table.add_column(name.replace("_", " "), justify="left" if words else "right")
        table.add_row(*map(_said, row.values()))
    return table


def _said(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
    return "-" if value is None else str(value)
