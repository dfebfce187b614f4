"""What a long prompt does to those who are being served already.

    python -m benchmarks.interference [--target DIR] [--dtype bfloat16]

Eight clients have texts written, one after another, so that their lengths are the same mixture
at all times; then prompts of 4,000 tokens arrive. Rounds are timed as clients see them, before,
and while a long prompt is being computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console

from benchmarks.measure.environment import RESULTS, describe
from benchmarks.measure.prompts import PROMPTS
from benchmarks.measure.services import serving
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.tools.local.pair import Pair, embedded

RUNNING = 8
LONG_PROMPT = 4000
_RUNNING_TOKENS = 512
_MAX_LENGTH = 8192
_ARRIVALS = 3
_QUIET_SECONDS = 20.0
# Long enough for the clients to be at different places of their texts.
_WARM_UP_SECONDS = 15.0


@dataclass(frozen=True)
class Interference:
    """Rounds of running texts, in milliseconds as their clients see them.

    Attributes:
        quiet_p50: before the long prompts came.
        quiet_p99: likewise.
        busy_p50: while one of them was being computed.
        busy_p99: likewise.
        quiet_rounds: how many those are.
        busy_rounds: how many these are.
        long_prompt_ttft_ms: time to first token of the long prompts, median.
    """

    quiet_p50: float
    quiet_p99: float
    busy_p50: float
    busy_p99: float
    quiet_rounds: int
    busy_rounds: int
    long_prompt_ttft_ms: float

    @property
    def p99_ratio(self) -> float:
        """How much longer the slowest rounds take beside a long prompt."""
        return self.busy_p99 / self.quiet_p99


def running_text(seed: int) -> pb.GenerateRequest:
    """One of a client's texts."""
    message = pb.Generation(
        prompt=PROMPTS[seed % len(PROMPTS)],
        stopping=pb.Stopping(max_new_tokens=_RUNNING_TOKENS, ignore_eos=True),
        speculation=pb.Speculation(gamma=4),
    )
    message.sampling.seed = seed
    return pb.GenerateRequest(generation=message)


def long_text(seed: int) -> pb.GenerateRequest:
    """A prompt of thousands of tokens, and a single new one."""
    token_ids = np.random.default_rng(seed).integers(300, 2000, LONG_PROMPT).tolist()
    message = pb.Generation(
        prompt_token_ids=token_ids, stopping=pb.Stopping(max_new_tokens=1, ignore_eos=True)
    )
    message.sampling.seed = seed
    return pb.GenerateRequest(generation=message)


async def measure(address: str) -> Interference:
    """Run the texts, then let the prompts arrive."""
    gaps: list[tuple[float, float]] = []  # when a round came, and how long it took

    async def read(stub: Any, client: int) -> None:
        for seed in count(client, RUNNING):
            last = 0.0
            async for event in stub.Generate(running_text(seed)):
                now = time.perf_counter()
                if event.HasField("round") and last:
                    gaps.append((now, now - last))
                last = now

    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        readers = [asyncio.create_task(read(stub, client)) for client in range(RUNNING)]
        await asyncio.sleep(_WARM_UP_SECONDS)
        quiet = (time.perf_counter(), time.perf_counter() + _QUIET_SECONDS)
        await asyncio.sleep(_QUIET_SECONDS)
        busy = []
        for seed in range(_ARRIVALS):
            started = time.perf_counter()
            async for _ in stub.Generate(long_text(seed)):
                pass
            busy.append((started, time.perf_counter()))
        for reader in readers:
            if reader.done():
                reader.result()  # it failed
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    before = [gap for at, gap in gaps if quiet[0] <= at <= quiet[1]]
    beside = [gap for at, gap in gaps if any(start <= at <= end for start, end in busy)]
    (quiet_p50, quiet_p99), (busy_p50, busy_p99) = (
        np.percentile(each, (50, 99)) * 1e3 for each in (before, beside)
    )
    waits = [end - start for start, end in busy]
    return Interference(
        float(quiet_p50),
        float(quiet_p99),
        float(busy_p50),
        float(busy_p99),
        len(before),
        len(beside),
        float(np.median(waits)) * 1e3,
    )


def main() -> None:
    """Measure, print and write benchmarks/results/interference-TARGET.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="checkpoint; the embedded target by default")
    parser.add_argument("--dtype", help="of the target, and of the drafter if it has no other")
    parser.add_argument("--drafter-dtype", help="of the drafter")
    arguments = parser.parse_args()
    pair = Pair(
        target=arguments.target or embedded("target"),
        drafter=embedded("drafter"),
        dtype=arguments.dtype,
        drafter_dtype=arguments.drafter_dtype,
        max_length=_MAX_LENGTH,
    )
    with serving(pair) as stack:
        found = asyncio.run(measure(stack.addresses["orchestrator"]))
    Console().print(
        f"round of {RUNNING} texts: p50 {found.quiet_p50:.1f} ms, p99 {found.quiet_p99:.1f} ms"
        f" ({found.quiet_rounds}); beside a prompt of {LONG_PROMPT} tokens: p50"
        f" {found.busy_p50:.1f} ms, p99 {found.busy_p99:.1f} ms ({found.busy_rounds}):"
        f" [b]{found.p99_ratio:.2f}x[/]; its first token took"
        f" {found.long_prompt_ttft_ms / 1e3:.1f} s"
    )
    RESULTS.mkdir(exist_ok=True)
    name = Path(arguments.target).name if arguments.target else "embedded"
    result = {
        "environment": describe(),
        "target": name,
        "dtype": arguments.dtype,
        "drafter_dtype": arguments.drafter_dtype,
        **asdict(found),
        "p99_ratio": found.p99_ratio,
    }
    (RESULTS / f"interference-{name}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
