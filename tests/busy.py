"""The tests on a busy machine: `make test-busy`.

    python -m tests.busy [--runs 10] [-- options of pytest]

In every second run four processes spin, so that the tests get a third of two cores. In the other
runs packages are installed over and over, so that the disk is busy writing. Each run must be
green. The output of a run is in .cache/busy-<run>.txt.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from tests.support.repository import ROOT

_SPINNING = 4
# Large, of many files, and in the cache of `make setup`: nothing is fetched.
_PACKAGES = ("numpy", "scipy", "matplotlib")


def _spin(folder: str) -> None:
    while True:
        pass


def _install(folder: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # and its installer with it
    uv = str(Path(sys.executable).with_name("uv"))
    wanted = [f"{package}=={version(package)}" for package in _PACKAGES]
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--reinstall"]
    command += ["--offline", "--link-mode=copy"]
    while True:
        subprocess.run([*command, "--target", folder, *wanted], check=True)


@contextmanager
def _beside(work: Callable[[str], None], processes: int) -> Iterator[None]:
    """Processes that do a work in a folder of their own until the block ends."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    started = [
        multiprocessing.Process(target=work, args=(folder.name,), daemon=True)
        for _ in range(processes)
    ]
    for process in started:
        process.start()
    try:
        yield
        if not all(process.is_alive() for process in started):
            raise SystemExit("what should keep the machine busy has ended: see the lines above")
    finally:
        for process in started:
            process.terminate()
            process.join()
        folder.cleanup()


def run(number: int, options: Sequence[str]) -> bool:
    """One run of the tests; whether it was green."""
    spins = number % 2 == 0
    beside = f"{_SPINNING} processes that spin" if spins else "package installs"
    kept = ROOT / ".cache" / f"busy-{number + 1}.txt"
    kept.parent.mkdir(exist_ok=True)
    print(f"run {number + 1}, beside {beside}; see {kept.relative_to(ROOT)}", flush=True)
    started = time.monotonic()
    with kept.open("w") as output, _beside(*((_spin, _SPINNING) if spins else (_install, 1))):
        code = subprocess.call(
            [sys.executable, "-m", "pytest", "-q", *options],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    said = kept.read_text().strip().splitlines()
    print(*(line for line in said if line.startswith(("FAILED", "ERROR"))), sep="\n", end="")
    print(f"  {said[-1].strip('= ')}; {(time.monotonic() - started) / 60:.1f} minutes", flush=True)
    return code == 0


def main() -> None:
    """See above; exit code 1 if a run was not green."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("options", nargs="*", help="of pytest, after --")
    chosen = parser.parse_args()
    green = [run(number, chosen.options) for number in range(chosen.runs)]
    print(f"{sum(green)} of {len(green)} runs were green")
    sys.exit(not all(green))


if __name__ == "__main__":
    main()
