"""`transformers` beside, while nothing else runs."""

from __future__ import annotations

import json

from benchmarks.gpu.pair import LeftOut
from benchmarks.gpu.run import Run
from benchmarks.gpu.table import Figure
from benchmarks.gpu.timing import Deadline

_ROLE = "transformers"


def wait(run: Run, until: Deadline) -> None:
    """Until it has compiled, so that it disturbs nothing that is timed from now on."""
    if _ROLE not in run.processes:
        return
    ready = run.scratch / "peer.ready"
    if not run.processes[_ROLE].wait(until.left, ready.exists):
        process = run.processes.pop(_ROLE)
        process.end()
        raise LeftOut(f"transformers was not ready in time: {process.tail[-200:]}")


def measure(run: Run, until: Deadline) -> None:
    """One greedy text; Tandem's plain one is its limit's place in the table."""
    if _ROLE not in run.processes:
        raise LeftOut("transformers: it was not started, or not ready")
    process, out = run.processes.pop(_ROLE), run.scratch / "peer.json"
    (run.scratch / "peer.go").touch()
    done = process.wait(until.left, out.exists)
    process.end()
    if not done:
        raise RuntimeError(f"transformers ended: {process.tail}")
    found = json.loads(out.read_text())
    run.found["transformers"] = found
    ms = found["ms_a_token"]
    run.add(Figure("transformers, compiled, 1 text, T0", "a token", ms))
    own = run.value("rounds, 1, T0", "plain") or run.value("rounds, 1, T1", "plain")
    if own:
        run.add(Figure("Tandem plain / transformers", "1 text", own, "ms", ms))
