"""Tandem on one GPU with the shapes of real models: where its time goes, beside what is possible.

    python -m benchmarks.gpu --minutes 8 --out DIR     on a machine with an NVIDIA GPU
    python -m benchmarks.gpu --fake --out DIR          tiny models on a CPU, to see that it works
    python -m benchmarks.gpu --sections ceilings,start,rounds    some of it

The models have random weights, made on the device, that agree as a real pair does: nothing is
downloaded. Sections share the time; one that fails is recorded, and the rest goes on. DIR/gpu.json
has everything, DIR/gpu.txt the tables; both are rewritten after each section. Exit code 0 where no
section failed (bars may), 1 where one did, 2 without a GPU, 3 where one hung.

Where nothing can be installed, carry wheels of requirements.txt's versions for that Python of

    aiodns annotated-types cffi cryptography googleapis-common-protos grpcio grpcio-channelz
    grpcio-health-checking grpcio-reflection llguidance opentelemetry-api opentelemetry-proto
    opentelemetry-exporter-http-transport opentelemetry-exporter-otlp-common
    opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc
    opentelemetry-exporter-otlp-proto-http opentelemetry-sdk opentelemetry-semantic-conventions
    prometheus-client protobuf pycares pycparser pydantic pydantic-core pydantic-settings pyjwt
    pytest-asyncio pytest-timeout python-dotenv rich starlette structlog typer typing-extensions
    typing-inspection uvicorn

(20 MB) beside torch 2.11 with its Triton, transformers 5.17, tokenizers, safetensors, numpy, numba,
scipy, peft, psutil, jinja2, anyio, h11, uvloop, pytest, pytest-xdist and hypothesis; on PYTHONPATH,
which the processes beside inherit. The generated stubs are in the repository. OpenVINO is not
needed: on a GPU nothing looks for it, and on a CPU this program asks for ENGINE=torch, where `auto`
would warn and go on with torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu import pair
from benchmarks.gpu.run import Run, sentence_without_gpu
from benchmarks.gpu.sections import (
    ceilings,
    drafts,
    kernels,
    law,
    numbers,
    passes,
    prefixes,
    rounds,
    services,
    start,
    transformers,
)
from benchmarks.gpu.shapes import fake, real
from benchmarks.gpu.timing import Deadline


class Section(NamedTuple):
    """A part of the run.

    Attributes:
        work: measures.
        share: of the time, relative to the others'.
    """

    work: Callable[[Run, Deadline], None]
    share: float


# In this order: what matters most first, then graphs of long texts, then the profiler, after which
# nothing on the host may be timed. `law` has processes of its own.
SECTIONS = {
    "ceilings": Section(ceilings.measure, 5),
    "start": Section(start.measure, 60),
    "quiet": Section(transformers.wait, 40),
    "passes": Section(passes.measure, 55),
    "prefixes": Section(prefixes.measure, 5),
    "drafts": Section(drafts.measure, 5),
    "rounds": Section(rounds.measure, 120),
    "services": Section(services.measure_inside, 45),
    "transformers": Section(transformers.measure, 15),
    "numbers": Section(numbers.measure, 20),
    "processes": Section(services.measure_apart, 50),
    "long": Section(passes.measure_long, 35),
    "kernels": Section(kernels.measure, 20),
    "numbers-device": Section(numbers.measure_device, 15),
    "rounds-device": Section(rounds.measure_device, 20),
    "law": Section(law.measure, 75),
}


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in SECTIONS]:
        raise argparse.ArgumentTypeError(
            f"no section {unknown[0]!r}; there are {', '.join(SECTIONS)}"
        )
    return names


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="of the whole run")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the results")
    parser.add_argument("--sections", type=_names, default=list(SECTIONS), help="by name, with ,")
    parser.add_argument("--skip", type=_names, default=[], help="sections to leave out, with ,")
    parser.add_argument("--no-peer", action="store_true", help="without transformers beside")
    parser.add_argument("--fake", action="store_true", help="tiny models on a CPU")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> Run:
    """Run the sections, and show the short table."""
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in SECTIONS if name in options.sections and name not in options.skip]
    run = Run(
        fake() if options.fake else real(),
        options.out,
        Deadline(60 * options.minutes),
        peer=not options.no_peer and "transformers" in chosen,
    )
    watchdog = run.watch()
    try:
        for at, name in enumerate(chosen):
            share = sum(SECTIONS[later].share for later in chosen[at:])
            # What a section did not need, the later ones have.
            seconds = run.deadline.left * SECTIONS[name].share / share
            if run.deadline.over:
                run.left_out.append(f"{name}: no time")
            else:
                run.section(name, SECTIONS[name].work, seconds)
    finally:
        run.close()
        run.write()
        watchdog.cancel()
    print("\n".join(["", *run.lines()]), flush=True)
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit code."""
    options = options_of(arguments)
    if not options.fake and (sentence := sentence_without_gpu()):
        print(sentence, file=sys.stderr)
        return 2
    pair.hush()
    return 1 if measure(options).errors else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads of the device's libraries may outlive the interpreter, and abort.
    os._exit(code)
