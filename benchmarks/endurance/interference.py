"""The effect of a long prompt on texts that are already running.

    python -m benchmarks.endurance.interference [--target DIR] [--dtype bfloat16] [--prompt 8000]

Eight clients request texts, one after another, so that the mixture of their lengths stays the same;
then long prompts arrive. Rounds are timed as clients see them, before a long prompt arrives and
while one is being computed; with each of the services' PREFILL_SHARE in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.measure.environment import RESULTS, keep
from benchmarks.measure.services import serving
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked, summaries
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.timeline import Timeline
from tandem.tools.local.pair import Pair, embedded

RUNNING = 8
_RUNNING_TOKENS = 512
# The longest text: what prompts have beside them.
_MAX_LENGTH, _BESIDE = 8192, 64
_ARRIVALS = 3
_QUIET_SECONDS = 20.0
# Long enough for the clients to be at different positions of their texts.
_WARM_UP_SECONDS = 15.0


@dataclass(frozen=True)
class Interference:
    """Rounds of running texts, in milliseconds as their clients see them.

    Attributes:
        share: what prompts may add to a pass.
        quiet_p50: before the long prompts arrived.
        quiet_p99: before the long prompts arrived.
        busy_p50: while a long prompt was being computed.
        busy_p99: while a long prompt was being computed.
        quiet_rounds: number of quiet rounds.
        busy_rounds: number of busy rounds.
        long_prompt_ttft_ms: time to first token of the long prompts, median.
        p99_ratio: busy_p99 / quiet_p99.
    """

    share: float
    quiet_p50: float
    quiet_p99: float
    busy_p50: float
    busy_p99: float
    quiet_rounds: int
    busy_rounds: int
    long_prompt_ttft_ms: float
    p99_ratio: float


def long_text(seed: int, tokens: int) -> pb.Generation:
    """A prompt of thousands of tokens, for a single new one."""
    prompt = np.random.default_rng(seed).integers(300, 2000, tokens).tolist()
    return asked(seed, 1, prompt=prompt)


async def measure(
    address: str, quiet_seconds: float, prompt_tokens: int, share: float
) -> Interference:
    """Run the texts, then let the prompts arrive.

    Raises:
        RuntimeError: a text failed.
    """
    running: list[Timeline] = []
    over = asyncio.Event()

    async def client(first: int) -> None:
        for seed in count(first, RUNNING):
            if over.is_set():
                break
            running.append(await generator.text(asked(seed, _RUNNING_TOKENS, gamma=4)))

    async with LoadGenerator(address) as generator:
        clients = [asyncio.create_task(client(number)) for number in range(RUNNING)]
        await asyncio.sleep(_WARM_UP_SECONDS)
        quiet = (time.perf_counter(), time.perf_counter() + quiet_seconds)
        await asyncio.sleep(quiet_seconds)
        arrived = [
            await generator.text(long_text(seed, prompt_tokens)) for seed in range(_ARRIVALS)
        ]
        # The rounds of a text are known when it is complete.
        over.set()
        await asyncio.gather(*clients)
    summaries((*running, *arrived))
    before = _gaps_within(running, [quiet])
    beside = _gaps_within(running, [(text.asked_s, text.ended_s) for text in arrived])
    (quiet_p50, quiet_p99), (busy_p50, busy_p99) = (
        np.percentile(each, (50, 99)).tolist() for each in (before, beside)
    )
    first_token = float(np.median([text.time_to_first_token_s for text in arrived])) * 1e3
    rounds = len(before), len(beside)
    ratio = busy_p99 / quiet_p99
    gaps = quiet_p50, quiet_p99, busy_p50, busy_p99
    return Interference(share, *gaps, *rounds, first_token, ratio)


def _gaps_within(texts: list[Timeline], spans: list[tuple[float, float]]) -> list[float]:
    """Milliseconds between messages of a text, if the later one arrived within one of the spans."""
    return [
        (now - last) * 1e3
        for text in texts
        for (last, _), (now, _) in pairwise(text.arrivals)
        if any(start <= now <= end for start, end in spans)
    ]


def main() -> None:
    """Measure, print and write benchmarks/results/interference-TARGET.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="checkpoint; the embedded target by default")
    parser.add_argument("--dtype", help="of the target, and by default of the drafter")
    parser.add_argument("--drafter-dtype", help="of the drafter")
    parser.add_argument("--quiet-seconds", type=float, default=_QUIET_SECONDS, help="at first")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of a long prompt")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0], help="PREFILL_SHARE")
    options = parser.parse_args()
    pair = Pair(
        target=options.target or embedded("target"),
        drafter=embedded("drafter"),
        dtype=options.dtype,
        drafter_dtype=options.drafter_dtype,
        max_length=max(_MAX_LENGTH, options.prompt + _BESIDE),
    )
    found = []
    for share in options.shares:
        own = {"PREFILL_SHARE": f"{share}"}
        with serving(pair, {"target": own, "drafter": own}) as stack:
            address, quiet = stack.addresses["orchestrator"], options.quiet_seconds
            found.append(asdict(asyncio.run(measure(address, quiet, options.prompt, share))))
        Console(width=140).print(table_of(found))
    name = Path(options.target).name if options.target else "embedded"
    keep(RESULTS / f"interference-{name}.json", options=vars(options), rows=found)


if __name__ == "__main__":
    main()
