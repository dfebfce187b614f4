"""The law of 2,000 texts on this device, by the project's own test."""

from __future__ import annotations

from benchmarks.gpu.pair import LeftOut
from benchmarks.gpu.run import Run
from benchmarks.gpu.table import Figure
from benchmarks.gpu.timing import Deadline

_TEST = "tests/system/gpu/test_services.py"
_CASE = "test_the_law_is_the_targets and model-dense"
_LEAST_SECONDS = 45.0


def measure(run: Run, until: Deadline) -> None:
    """A chain's law by three rules; what the test said is in its log."""
    if run.shapes.real and until.left < _LEAST_SECONDS:
        raise LeftOut(f"needs {_LEAST_SECONDS:.0f} s, {until.left:.0f} are left")
    command = ["pytest", "-q", "-x", "-m", "campaign", "-p", "no:cacheprovider"]
    command += [_TEST, "-k", _CASE]
    if not run.shapes.real:
        command.append("--collect-only")
    process = run.spawn("law", command)
    process.wait(until.left)
    code = process.code
    run.found["law"] = {"code": code, "said": process.tail}
    if code is None:
        process.end()
        raise LeftOut("the law: the test took longer than there was time")
    run.add(Figure("law of 2,000 texts", "exit code", float(code), "", bar=0.0))
