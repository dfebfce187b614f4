"""One run: what is measured with, what was found so far, and how a section is guarded."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import table
from benchmarks.gpu.pair import LeftOut, Measured
from benchmarks.gpu.processes import Process
from benchmarks.gpu.shapes import Shapes
from benchmarks.gpu.table import Figure
from benchmarks.gpu.timing import Deadline, Stopwatch
from benchmarks.measure.environment import describe, versions

# After the end: sections look at their time between two measurements.
_GRACE_SECONDS = 20.0
_LONGEST_ERROR = 400


@dataclass
class Run:
    """A run's parts; sections write to it.

    Attributes:
        shapes: what is measured.
        out: folder of the results.
        deadline: of the whole run.
        peer: whether `transformers` is measured beside.
        pair: models that have been started, by name.
        bandwidth: bytes a second that the device reads; an H100's until it is measured.
        operations: a second that it computes; likewise.
        figures: for the table.
        found: everything else, by section.
        errors: of sections, and of their parts.
        left_out: parts that this device has no room for, or that no time was left for.
        seconds: that each section took.
        processes: beside; killed at the end.
    """

    shapes: Shapes
    out: Path
    deadline: Deadline
    peer: bool = True
    pair: dict[str, Measured] = field(default_factory=dict)
    bandwidth: float = 3.0e12
    operations: float = 750e12
    figures: list[Figure] = field(default_factory=list)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    _began: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.stopwatch = Stopwatch(self.shapes.device, self.shapes.turn)

    @cached_property
    def scratch(self) -> Path:
        """Folder for what processes beside write, until the run ends: of `out` a machine that is
        lent may bring back few files."""
        return Path(tempfile.mkdtemp(prefix="benchmarks-gpu-"))

    def say(self, text: str) -> None:
        """Tell a person what is going on."""
        print(f"[{time.perf_counter() - self._began:6.1f}] {text}", flush=True)

    def add(self, *figures: Figure) -> None:
        """Keep figures, and show them."""
        self.figures += figures
        for figure in figures:
            self.say(f"  {figure.line}: {figure}")

    def value(self, line: str, name: str) -> float | None:
        """A figure that was found before."""
        found = [one.value for one in self.figures if (one.line, one.name) == (line, name)]
        return found[-1] if found else None

    def model(self, name: str) -> Measured:
        """One of the pair.

        Raises:
            LeftOut: it was not started.
        """
        if name not in self.pair:
            raise LeftOut(f"there is no {name}: see the section start")
        return self.pair[name]

    def models(self) -> list[Measured]:
        """Those of the pair that were started.

        Raises:
            LeftOut: none was.
        """
        if not self.pair:
            raise LeftOut("there is no model: see the section start")
        return list(self.pair.values())

    def floor_ms(
        self, of: Measured, texts: int, rows: int, context: int, wanted: int | None = None
    ) -> float:
        """What a pass takes at least: the longer of reading and computing.

        Args:
            of: the model.
            texts: in the pass.
            rows: of each.
            context: tokens before them.
            wanted: rows with logits, of all texts; None for all.
        """
        wanted = texts * rows if wanted is None else wanted
        reading = of.bytes_of(texts, rows, context) / self.bandwidth
        computing = of.operations_of(texts, rows, context, wanted) / self.operations
        return 1e3 * max(reading, computing)

    def spawn(self, role: str, command: Sequence[str], **variables: str) -> Process:
        """A process beside, which ends with the run."""
        process = Process(role, command, self.scratch, variables)
        self.processes[role] = process
        return process

    def attempt(self, name: str, work: Callable[[], object]) -> None:
        """Do a part; what it fails with is kept, and the next one goes on."""
        try:
            work()
        except (LeftOut, torch.cuda.OutOfMemoryError) as error:
            self.left_out.append(f"{name}: {' '.join(str(error).split())[:_LONGEST_ERROR]}")
            self.say(f"left out: {self.left_out[-1]}")
        except Exception as error:
            sentence = f"{type(error).__name__}: {error}"
            self.errors[name] = sentence[:_LONGEST_ERROR]
            traceback.print_exc(file=sys.stdout)

    def section(self, name: str, work: Callable[[Run, Deadline], None], seconds: float) -> None:
        """Do a section, and write what there is."""
        began = time.perf_counter()
        self.say(f"== {name} ({seconds:.0f} of {self.deadline.left:.0f} s)")
        self.attempt(name, lambda: work(self, Deadline(seconds)))
        if self.shapes.real:
            gc.collect()
            torch.cuda.empty_cache()
        self.seconds[name] = round(time.perf_counter() - began, 1)
        self.write()

    def lines(self, most: int = table.MOST_CHARACTERS) -> list[str]:
        """The short table, then what failed."""
        machine = describe()
        name = machine["gpu"] if self.shapes.real else "a CPU, tiny models: figures say nothing"
        head = f"{name}; torch {torch.__version__}; {machine['machine']}, {machine['cores']} cores"
        end = [f"seconds: {self.seconds}"]
        end += [f"left out: {one}" for one in self.left_out]
        end += [f"ERROR {where}: {error}" for where, error in self.errors.items()]
        bars = list(table.failed(self.figures))
        end += ["bars that do not hold:", *bars] if bars else ["all bars hold that were measured"]
        spent = sum(len(line) + 1 for line in (head, *end))
        return [head, *table.short_table(self.figures, max(most - spent, 0)), *end]

    def write(self) -> None:
        """gpu.json and gpu.txt, as far as the run is."""
        whole = {
            "environment": describe() | versions("triton"),
            "figures": [asdict(one) | {"ratio": one.ratio} for one in self.figures],
            "found": self.found,
            "errors": self.errors,
            "left_out": self.left_out,
            "seconds": self.seconds,
        }
        part = self.out / "gpu.json.part"
        part.write_text(json.dumps(whole, indent=1, default=str) + "\n")
        part.replace(self.out / "gpu.json")
        text = [*self.lines(1 << 20), "", *table.long_table(self.figures)]
        (self.out / "gpu.txt").write_text("\n".join(text) + "\n")

    def watch(self) -> threading.Timer:
        """Whatever hangs: a while after the deadline what there is is written and shown, and the
        process ends. To be cancelled where all went well."""
        timer = threading.Timer(max(self.deadline.left, 0) + _GRACE_SECONDS, self._give_up)
        timer.daemon = True
        timer.start()
        return timer

    def _give_up(self) -> None:
        self.errors["watchdog"] = "a section hung; the process was ended"
        try:
            self.close()
            self.write()
            print("\n".join(self.lines()), flush=True)
        finally:
            os._exit(3)

    def close(self) -> None:
        """End the processes beside, and drop what they wrote."""
        for process in self.processes.values():
            process.end()
        shutil.rmtree(self.scratch, ignore_errors=True)


def sentence_without_gpu() -> str:
    """Why nothing can be measured; empty where it can."""
    if torch.cuda.is_available():
        return ""
    beside = "" if _driver() else ", and there is no NVIDIA driver"
    return (
        f"benchmarks.gpu measures a CUDA device, and torch sees none{beside};"
        " --fake runs everything with tiny models on a CPU, to see that it works"
    )


def _driver() -> bool:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False)
    except OSError:
        return False
    return not found.returncode
