"""Plots of loads, as SVG elements for a self-contained page. They need matplotlib."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np

from tandem.tools.load.ghz.calls import Calls
from tandem.tools.load.ghz.outcome import Outcome
from tandem.tools.load.ghz.scenario import OK
from tandem.tools.load.objective import Objective
from tandem.tools.load.sweep import Level
from tandem.tools.load.timeline import Percentiles

matplotlib.use("Agg")  # needs no display, and does not look for one

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_WIDTH = 9.0
# Okabe and Ito's colours, which colour-blind people can tell apart.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
_GOOD, _BAD = _COLORS[0], _COLORS[5]
_BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "fontsize": 9}
# Metadata that matplotlib adds to its files, with URLs in it; the page contains no URLs.
_SAID = ("Creator", "Date", "Format", "Type")
_STYLE: dict[Any, Any] = {
    # Text stays text, in the reader's own font.
    "svg.fonttype": "none",
    # Fixed salt: ids inside the SVG do not change from run to run.
    "svg.hashsalt": "tandem",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def over_time(outcomes: Sequence[Outcome]) -> str:
    """Each call's latency by its start, a panel per scenario."""
    with _figure(len(outcomes), 1.7) as (figure, panels):
        for axes, outcome in zip(panels, outcomes, strict=True):
            groups = _by_kind(outcome.calls, outcome.expected)
            for (label, (starts, latencies)), color, mark in zip(
                groups.items(), (_GOOD, _BAD), (".", "x"), strict=True
            ):
                if starts:
                    axes.plot(starts, latencies, mark, color=color, label=label, alpha=0.7)
            axes.set_title(f"{outcome.name}: {outcome.loop}", loc="left", fontsize=10)
            axes.set_ylabel("ms")
            axes.set_ylim(bottom=0)
            if outcome.failed:
                axes.legend(loc="upper right")
        panels[-1].set_xlabel("start, seconds after the first call's")
        return _svg(figure)


def _by_kind(
    calls: Calls, expected: Sequence[str]
) -> Mapping[str, tuple[list[float], list[float]]]:
    """Starts (seconds) and latencies (milliseconds) of successful and of failed calls."""
    found: dict[str, tuple[list[float], list[float]]] = {"ended well": ([], []), "failed": ([], [])}
    for call in calls.calls:
        starts, latencies = found["ended well" if call.status in expected else "failed"]
        starts.append(call.started_s)
        latencies.append(call.latency_s * 1e3)
    return found


def distributions(outcomes: Sequence[Outcome]) -> str:
    """The share of calls that had ended by a time, a line per scenario."""
    with _figure(1, 4.0) as (figure, (axes,)):
        for outcome, color in zip(outcomes, _COLORS * len(outcomes), strict=False):
            ended = [c.latency_s for c in outcome.calls.calls if c.status in outcome.expected]
            if ended:
                times = np.sort(ended) * 1e3
                shares = np.arange(1, len(times) + 1) / len(times)
                label = f"{outcome.name} (TTFT)" if outcome.ttft else outcome.name
                axes.step(times, shares, where="post", color=color, label=label)
        axes.set_xscale("log")
        axes.set_xlabel("milliseconds")
        axes.set_ylabel("share of the calls that ended well")
        if axes.has_data():
            axes.legend(loc="lower right", fontsize=9)
        return _svg(figure)


def statuses(outcomes: Sequence[Outcome]) -> str:
    """How calls ended, a bar per scenario."""
    names = [outcome.name for outcome in outcomes]
    found = {status for outcome in outcomes for status in outcome.calls.statuses}
    # OK comes first, so that it has the same colour in every report.
    kinds = sorted(found, key=lambda kind: (kind != OK, kind))
    with _figure(1, 1.0 + 0.35 * len(outcomes)) as (figure, (axes,)):
        left = np.zeros(len(outcomes))
        for kind, color in zip(kinds, _COLORS * len(kinds), strict=False):
            shares = np.array(
                [o.calls.statuses.get(kind, 0) / max(o.calls.count, 1) for o in outcomes]
            )
            axes.barh(names, shares, left=left, color=color, label=kind)
            left += shares
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of the calls")
        axes.grid(visible=False)
        if kinds:
            axes.legend(**_BESIDE)
        return _svg(figure)


def rates(levels: Sequence[Level], objective: Objective) -> str:
    """TTFT, TPOT and the share of good texts by the rate, with the objective's limits."""
    ordered = sorted(levels, key=lambda level: level.rate)
    with _figure(3, 1.9, sharex=True) as (figure, (first, later, good)):
        _times(first, [(level.rate, level.report.ttft) for level in ordered], objective.ttft_ms)
        _times(later, [(level.rate, level.report.tpot) for level in ordered], objective.tpot_ms)
        first.set_ylabel("TTFT, ms")
        later.set_ylabel("TPOT, ms")
        for held, color, mark in ((True, _GOOD, "o"), (False, _BAD, "x")):
            chosen = [level for level in ordered if level.goodput.held == held]
            shares = [level.goodput.share for level in chosen]
            label = "objective held" if held else "not held"
            axes_rates = [level.rate for level in chosen]
            good.plot(axes_rates, shares, mark, color=color, linestyle="none", label=label)
        good.axhline(objective.share, color="black", linestyle="--", linewidth=1)
        good.set_ylabel("share of good texts")
        good.set_xlabel("texts asked for a second")
        good.legend(**_BESIDE)
        return _svg(figure)


def _times(
    axes: Axes, times: Sequence[tuple[float, Percentiles | None]], limit: float | None
) -> None:
    known = [(rate, found) for rate, found in times if found is not None]
    x = [rate for rate, _ in known]
    axes.plot(x, [found.p50 for _, found in known], "o-", color=_COLORS[2], label="p50")
    axes.plot(x, [found.p99 for _, found in known], "s-", color=_COLORS[1], label="p99")
    if limit is not None:
        axes.axhline(limit, color="black", linestyle="--", linewidth=1, label="objective")
    axes.set_yscale("log")
    axes.legend(**_BESIDE)


@contextmanager
def _figure(
    panels: int, height: float, sharex: bool = False
) -> Iterator[tuple[Figure, Sequence[Axes]]]:
    """A figure with `panels` panels below each other, each `height` inches high."""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(
            panels,
            figsize=(_WIDTH, panels * height + 0.4),
            layout="constrained",
            sharex=sharex,
            squeeze=False,
        )
        try:
            yield figure, list(axes[:, 0])
        finally:
            plt.close(figure)


def _svg(figure: Figure) -> str:
    """The svg element alone, without the XML header of a file."""
    file = io.StringIO()
    figure.savefig(
        file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    text = file.getvalue()
    return text[text.index("<svg") :]
