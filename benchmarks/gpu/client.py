"""Clients of an orchestrator, in a process without torch.

    python -m benchmarks.gpu.client PLAN

PLAN is a JSON file: address, out, seconds, texts and gammas to measure, tokens of a text, prompt,
vocabulary. What is found is written to `out` after each setting.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure.texts import asked
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.timeline import Timeline

_TEXT_SECONDS = 60.0
_AGAIN_SECONDS = 0.2
_WARM_UP_TOKENS = 16


def _request(plan: dict[str, Any], seed: int, tokens: int, gamma: int) -> pb.Generation:
    # No two texts have one prompt.
    ids = [(token + 17 * seed) % (plan["vocabulary"] - 2) + 1 for token in plan["prompt"]]
    return asked(seed, tokens, 1.0, ids, gamma=gamma, verifier="block")


async def _together(
    generator: LoadGenerator, plan: dict[str, Any], seed: int, texts: int, tokens: int, gamma: int
) -> tuple[list[Timeline], float]:
    """So many texts at once, and their seconds."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    requests = [_request(plan, seed + number, tokens, gamma) for number in range(texts)]
    timelines = await asyncio.gather(*(generator.text(request) for request in requests))
    return list(timelines), loop.time() - began


async def _ready(generator: LoadGenerator, plan: dict[str, Any], until: float) -> str:
    """Ask until the services have found each other; else what they say."""
    error = "no time"
    while asyncio.get_running_loop().time() < until:
        error = (await generator.text(_request(plan, 1, 8, max(plan["gammas"])))).error
        if not error:
            break
        await asyncio.sleep(_AGAIN_SECONDS)
    return error


def _summed(timelines: list[Timeline], seconds: float) -> dict[str, Any]:
    tokens = sum(one.tokens for one in timelines)
    sent = [one for one in timelines if len(one.arrivals) > 1]
    gaps = [gap for one in sent for gap in one.gaps_s]
    return {
        "tokens_per_s": tokens / seconds,
        # The mean: a run's rounds may come several at once.
        "ms_a_round": 1e3 * sum(gaps) / max(len(gaps), 1),
        "tokens_a_round": sum(one.tokens - one.arrivals[0][1] for one in sent) / max(len(gaps), 1),
        "first_ms": 1e3 * median(one.time_to_first_token_s for one in sent),
        "errors": [one.error for one in timelines if one.error][:1],
    }


async def measure(plan: dict[str, Any]) -> None:
    """Setting by setting, as long as there is time."""
    loop, out = asyncio.get_running_loop(), Path(plan["out"])
    until, found = loop.time() + plan["seconds"], dict[str, Any]()
    async with LoadGenerator(plan["address"], _TEXT_SECONDS) as generator:
        if error := await _ready(generator, plan, until):
            sys.exit(error)
        for texts in plan["texts"]:
            for gamma in plan["gammas"]:
                if loop.time() > until:
                    break
                await _together(generator, plan, 50, texts, _WARM_UP_TOKENS, gamma)
                timelines, seconds = await _together(
                    generator, plan, 200, texts, plan["tokens"], gamma
                )
                found[f"{texts}, T1, {gamma or 'plain'}"] = _summed(timelines, seconds)
                part = out.with_suffix(".part")
                part.write_text(json.dumps(found))
                part.replace(out)


if __name__ == "__main__":
    asyncio.run(measure(json.loads(Path(sys.argv[1]).read_text())))
