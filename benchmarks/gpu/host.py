"""What the host does during a round: its parts, which passes were captured, what torch compiles.

All is wrapped from outside, so that the product has no hooks for it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo import utils as dynamo

from benchmarks.gpu.pair import Measured
from tandem.engine import stepper as steppers
from tandem.engine.numbers import home
from tandem.engine.stepper import Stepper
from tandem.inference.passes import cuda_graphs, torch_llama

# Phases of the compiler that are counted, of `compilation_time_metrics`.
_COMPILED = "compile_inner"


class Host:
    """Seconds and calls of the host's parts since the last `reset`.

    Attributes:
        seconds: by part; parts are within each other ("step" is all of the engine's thread).
        calls: by part.
        passes: ms of each pass on the host, by model and by whether it was captured.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.passes: defaultdict[str, list[float]] = defaultdict(list)
        self._replays = 0

    @contextmanager
    def watching(self, models: Sequence[Measured]) -> Iterator[None]:
        """Count until the end."""
        parts: list[tuple[Any, str, str]] = [
            (steppers, "draw", "draw"),
            (steppers, "drawn_on", "chains"),
            (steppers, "decide", "decide"),
            (steppers, "decisions_of", "verdicts home"),
            (steppers, "drafts_of", "drafts home"),
            (home, "copy_to_host", "wait and copy"),
            (torch_llama, "attend", "attention launched"),
            (Stepper, "step", "step"),
        ]
        with ExitStack() as stack:
            for owner, name, part in parts:
                if hasattr(owner, name):
                    wrapped = self._timed(part, getattr(owner, name))
                    stack.enter_context(patch.object(owner, name, wrapped))
            for model in models:
                wrapped = self._pass(model.name, model.decoder.forward)
                stack.enter_context(patch.object(model.decoder, "forward", wrapped))
            stack.enter_context(self._replayed())
            yield

    def _timed(self, part: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return own(*args, **options)
            finally:
                self.seconds[part] += time.perf_counter() - began
                self.calls[part] += 1

        return timed

    def _pass(self, model: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began, before = time.perf_counter(), self._replays
            try:
                return own(*args, **options)
            finally:
                spent = time.perf_counter() - began
                self.seconds[model] += spent
                self.calls[model] += 1
                how = "captured" if self._replays > before else "launched"
                self.passes[f"{model} {how}"].append(1e3 * spent)

        return timed

    @contextmanager
    def _replayed(self) -> Iterator[None]:
        own = cuda_graphs.Graph.__call__

        def counted(graph: Any, *given: Any) -> Any:
            self._replays += 1
            return own(graph, *given)

        with patch.object(cuda_graphs.Graph, "__call__", counted):
            yield

    def reset(self) -> None:
        """Count anew."""
        self.seconds.clear()
        self.calls.clear()
        self.passes.clear()

    def a_round(self, rounds: int) -> dict[str, float]:
        """ms of each part, and calls, a round."""
        ms = {part: round(1e3 * spent / rounds, 3) for part, spent in self.seconds.items()}
        calls = {f"calls of {part}": round(n / rounds, 2) for part, n in self.calls.items()}
        return ms | calls

    def of_passes(self) -> dict[str, dict[str, Any]]:
        """How long passes keep the host, by their kind."""
        return {
            kind: {
                "passes": len(each),
                "median_ms": round(median(each), 3),
                "longest_ms": round(max(each), 3),
                "first_ms": [round(ms, 2) for ms in each[:6]],
                "last_ms": [round(ms, 2) for ms in each[-6:]],
            }
            for kind, each in self.passes.items()
        }


@contextmanager
def compiler() -> Iterator[dict[str, Any]]:
    """What torch's compiler does meanwhile: the dictionary is filled at the end.

    Keys: "graphs" captured anew, "compilations" with their seconds, "guards" that were evaluated
    before a call, and how many of these found nothing compiled that fits ("misses").
    """
    found: dict[str, Any] = {"guards": 0, "misses": 0}
    setter = getattr(torch._C._dynamo.eval_frame, "set_guard_complete_hook", None)

    def complete(fits: bool) -> bool:
        found["guards"] += 1
        found["misses"] += not fits
        return fits

    before = _compiled()
    earlier = None if setter is None else setter(complete)
    try:
        yield found
    finally:
        if setter is not None:
            setter(earlier)
        for key, value in _compiled().items():
            found[key] = round(value - before[key], 3)


def _compiled() -> dict[str, float]:
    phases: Any = dynamo.compilation_time_metrics
    times = [seconds for name, own in phases.items() if _COMPILED in name for seconds in own]
    return {
        "graphs": dynamo.counters["stats"]["unique_graphs"],
        "frames": dynamo.counters["frames"]["total"],
        "compilations": len(times),
        "compiling_s": sum(times),
    }
