"""The fastest ways to decode once more, back to back: the ratios that are quoted.

The table's texts of two methods lie a minute apart, which on a shared machine is another
speed; and the best of many medians is too good, as it was chosen for its luck too. So the
finalists write texts of their own, one right after the other, and a ratio is the median over
texts of what the same prompt and seed took.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from rich.progress import Progress

from benchmarks.contest.contest import Contest
from benchmarks.contest.method import Method, System
from tandem.tools.load.timeline import Timeline

_BLOCK = f"{System.TANDEM} block"
# The table may err on the best dtype or draft length; plain generation has little to choose.
_FINALISTS = {_BLOCK: 2, System.ASSISTED: 2, System.ASSISTED_DEFAULTS: 2, System.GENERATE: 1}
# Seeds that the table has not used.
_FIRST_SEED = 1000


@dataclass(frozen=True)
class Ratio:
    """Tandem with block verification over another system, both at their best.

    Attributes:
        temperature: of all texts.
        block: the faster finalist of Tandem.
        other: the faster finalist of the other system.
        block_tokens_per_s: its median over texts.
        other_tokens_per_s: its median over texts.
        ratios: of their speeds, text by text.
    """

    temperature: float
    block: Method
    other: Method
    block_tokens_per_s: float
    other_tokens_per_s: float
    ratios: tuple[float, ...]

    def __str__(self) -> str:
        low, _, high = quantiles(self.ratios, n=4)
        return (
            f"temperature {self.temperature:g}: {_named(self.block)} is"
            f" {median(self.ratios):.2f} x {_named(self.other)}"
            f" ({self.block_tokens_per_s:.1f} and {self.other_tokens_per_s:.1f} tokens/s;"
            f" {len(self.ratios)} texts each, half of the ratios {low:.2f} to {high:.2f})"
        )


def _named(method: Method) -> str:
    own = "" if not method.gamma else f"gamma {method.gamma}, "
    return f"{method} ({own}{method.dtype})"


def run_off(contest: Contest, texts: int, budget_s: float, progress: Progress) -> list[Ratio]:
    """Let the finalists of a contest that has run write more texts.

    Args:
        contest: with its texts.
        texts: of each finalist and temperature, at least 2.
        budget_s: a further text of everyone starts only if it is likely to end within this
            time.
        progress: gets a bar.
    """
    finalists = {t: _finalists(contest, t) for t in contest.temperatures}
    written: dict[tuple[Method, float], list[Timeline]] = {
        (method, t): [] for t, methods in finalists.items() for method in methods
    }
    bar = progress.add_task("run-off", total=texts * len(written))
    started = time.perf_counter()
    for turn in range(texts):
        spent = time.perf_counter() - started
        if turn > 1 and spent * (turn + 1) / turn > budget_s:
            break
        for temperature, methods in finalists.items():
            # Another one goes first each time.
            shift = turn % len(methods)
            for method in (*methods[shift:], *methods[:shift]):
                text = contest.text(method, temperature, _FIRST_SEED + turn, contest.new_tokens)
                written[method, temperature].append(text)
                progress.advance(bar)
    speeds = {key: [text.tokens / text.latency_s for text in own] for key, own in written.items()}
    return [ratio for t, methods in finalists.items() for ratio in ratios(t, methods, speeds)]


def _finalists(contest: Contest, temperature: float) -> list[Method]:
    def speed(method: Method) -> float:
        return median(t.tokens / t.latency_s for t in contest.texts[method, temperature])

    chosen: list[Method] = []
    for name, count in _FINALISTS.items():
        mine = [method for method in contest.methods if str(method) == name]
        chosen += sorted(mine, key=speed, reverse=True)[:count]
    return chosen


def ratios(
    temperature: float,
    methods: Sequence[Method],
    speeds: dict[tuple[Method, float], list[float]],
) -> list[Ratio]:
    """The best of Tandem over the best of every other system.

    Args:
        temperature: of the texts.
        methods: all finalists.
        speeds: tokens a second of their texts, in the same order of prompts and seeds.
    """

    def best(name: str) -> Method:
        mine = [method for method in methods if str(method) == name]
        return max(mine, key=lambda method: median(speeds[method, temperature]))

    block = best(_BLOCK)
    others = [best(name) for name in _FINALISTS if name != _BLOCK]
    own = speeds[block, temperature]
    return [
        Ratio(
            temperature,
            block,
            other,
            median(own),
            median(speeds[other, temperature]),
            tuple(a / b for a, b in zip(own, speeds[other, temperature], strict=True)),
        )
        for other in others
    ]
