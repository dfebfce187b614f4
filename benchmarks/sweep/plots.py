"""The sweeps as plots, one SVG each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # needs no display, and does not look for one

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_SIZE = (10.0, 4.0)

Points = Sequence[Mapping[str, Any]]


def draw(sweeps: Mapping[str, Points], stem: Path) -> list[Path]:
    """Write one plot per sweep.

    Args:
        sweeps: as in the JSON file.
        stem: of the files' names.

    Returns:
        The paths of the files.
    """
    pictures: dict[str, Callable[[Points, Axes, Axes], None]] = {
        "concurrency": _concurrency,
        "support_size": _support_size,
        "exact_block_efficiency": _block_efficiency,
        "network_delay": _network_delay,
    }
    paths = []
    for name, picture in pictures.items():
        figure, (left, right) = plt.subplots(1, 2, figsize=_SIZE, layout="constrained")
        picture(sweeps[name], left, right)
        path = stem.with_name(f"{stem.name}-{name.replace('_', '-')}.svg")
        figure.savefig(path)
        plt.close(figure)
        paths.append(path)
    return paths


def _concurrency(points: Points, left: Axes, right: Axes) -> None:
    for method, loop in dict.fromkeys((p["method"], p["loop"]) for p in points):
        mine = [p for p in points if (p["method"], p["loop"]) == (method, loop)]
        style = "o-" if loop == "closed" else "s--"
        _lines(mine, "concurrency", f"{method}, {loop} loop", ("ttft", "p99"), left, right, style)
    _label(left, "clients (open loop: 0.7 of their rate)", "tokens/s")
    _label(right, "clients (open loop: 0.7 of their rate)", "p99 TTFT, ms")
    levels = list(dict.fromkeys(p["concurrency"] for p in points))
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(levels, [str(level) for level in levels])
    right.set_yscale("log")


def _support_size(points: Points, left: Axes, right: Axes) -> None:
    names = [str(p["support"] or "full") for p in points]
    left.plot(names, [100 * p["overlap_lost"] for p in points], "o-")
    left.axhline(0.5, linestyle=":", label="aim: 0.5 %")
    right.plot(names, [p["bytes_a_round"] / 1024 for p in points], "o-")
    right.axhline(16, linestyle=":", label="aim: 16 KiB")
    _label(left, "support size", "overlap lost, %")
    _label(right, "support size", "KiB a round, gamma 4")


def _block_efficiency(points: Points, left: Axes, right: Axes) -> None:
    gammas = [str(p["gamma"]) for p in points]
    for rule in ("token", "block"):
        errors = [p[f"{rule}_se"] for p in points]
        left.errorbar(gammas, [p[rule] for p in points], errors, fmt="o-", capsize=4, label=rule)
    gains = [100 * (p["block_to_token"] - 1) for p in points]
    errors = [100 * p["block_to_token_se"] for p in points]
    right.errorbar(gammas, gains, errors, fmt="o-", capsize=4, label="block over token")
    _label(left, "gamma", "exact block efficiency")
    _label(right, "gamma", "gain, %")


def _network_delay(points: Points, left: Axes, right: Axes) -> None:
    for gamma in dict.fromkeys(p["gamma"] for p in points):
        mine = [p for p in points if p["gamma"] == gamma]
        _lines(mine, "delay_ms", f"gamma {gamma}", ("round", "p50"), left, right)
    _label(left, "delay a hop, ms", "tokens/s")
    _label(right, "delay a hop, ms", "p50 of a round, ms")


def _lines(
    points: Points,
    x: str,
    label: str,
    time: tuple[str, str],
    left: Axes,
    right: Axes,
    style: str = "o-",
) -> None:
    """Lines of tokens/s and of a time's percentile; with a gap if every text failed."""
    name, percentile = time
    reports = [p["report"] for p in points]
    times = [each[name][percentile] if each[name] else float("nan") for each in reports]
    for axes, y in ((left, [each["tokens_per_s"] for each in reports]), (right, times)):
        axes.plot([p[x] for p in points], y, style, label=label)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend()
