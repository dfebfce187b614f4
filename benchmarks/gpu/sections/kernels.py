"""Kernels of a pass by name, captured and launched."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu import pair
from benchmarks.gpu.device import work_of
from benchmarks.gpu.pair import Measured
from benchmarks.gpu.run import Run
from benchmarks.gpu.table import Figure
from benchmarks.gpu.timing import Deadline
from tandem.inference.feed import Feed

_TURNS = 6
_SETTINGS = ((1, 1, True), (16, 5, True), (1, 1, False), (1, 17, False))
_LISTED, _SHOWN = 40, 6
_ROOM = 64


@torch.inference_mode()
def measure(run: Run, until: Deadline) -> None:
    """The profiler slows launches; the device's own times are right."""
    for of in run.models():
        if of.told.get("graphs of") != run.shapes.longest:
            run.attempt(f"graphs of the {of.name}", partial(of.capture, run.shapes.longest))
        for texts, rows, captured in _SETTINGS:
            how = "captured" if captured else "launched"
            name = f"{of.name} {texts}x{rows} {how}"
            if until.over:
                run.left_out.append(f"kernels of {name}: no time")
                continue
            run.attempt(f"kernels of {name}", partial(_of_pass, run, of, texts, rows, captured))


def _of_pass(run: Run, of: Measured, texts: int, rows: int, captured: bool) -> None:
    context, graphs = run.shapes.contexts[0], of.backend.graphs
    with of.texts(texts, context, _ROOM) as caches:
        feeds = [Feed(cache, pair.tokens(rows, run.shapes), rows) for cache in caches]

        def work() -> None:
            of.decoder.forward(feeds)
            for cache in caches:
                cache.rollback(context)
            run.stopwatch.wait()

        if not captured:
            of.backend.graphs = None
        try:
            work()
            seen = work_of(run.shapes.device, work, _TURNS)
        finally:
            of.backend.graphs = graphs
    how = "captured" if captured else "launched"
    line = f"kernels, {of.name} {texts}x{rows} {how}"
    found = seen.a_turn(_TURNS, _LISTED)
    run.found.setdefault("kernels", {})[line] = found
    limit = run.floor_ms(of, texts, rows, context)
    each = f", {found['kernels'] / of.layers:.1f}/layer"
    run.add(
        Figure(line, "busy", found["device_ms"], "ms", limit, mark=each),
        Figure(line, "gaps", found["gaps_ms"]),
    )
    for row in found["by_name"][:_SHOWN]:
        run.say(
            f"    {row['us']:9.1f} us = {row['calls']:6.1f} x {row['us_each']}  {row['name'][:70]}"
        )
