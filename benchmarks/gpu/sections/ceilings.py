"""What the device can do: copies, reads, products. Limits follow from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.run import Run
from benchmarks.gpu.table import Figure
from benchmarks.gpu.timing import Deadline

_LINE = "ceilings"


def measure(run: Run, until: Deadline) -> None:
    """Bandwidth of tensors that no cache holds, and a square product."""
    shapes, device = run.shapes, run.shapes.device
    size = shapes.copied
    if shapes.real:
        size = min(size, torch.cuda.mem_get_info()[0] // 4)
    ones = torch.ones(size // 4, dtype=torch.float32, device=device)
    other = torch.empty_like(ones)
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, partial(other.copy_, ones)),
        "sum": (1, ones.sum),
        "maximum": (1, ones.max),
    }
    speeds = []
    for name, (moved, work) in ways.items():
        milliseconds, _ = run.stopwatch.times(work)
        speeds.append(moved * ones.nbytes / milliseconds * 1e3)
        run.add(Figure(_LINE, name, speeds[-1] / 1e9, "GB/s"))
    run.bandwidth = max(speeds)
    del ones, other, ways, work
    n = shapes.product
    first, second = (torch.randn(n, n, device=device, dtype=shapes.dtype) for _ in range(2))
    milliseconds, _ = run.stopwatch.times(lambda: first @ second)
    run.operations = 2 * n**3 / milliseconds * 1e3
    run.add(Figure("ceilings, product", f"{n}^3", run.operations / 1e12, "TFLOP/s"))
