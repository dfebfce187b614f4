"""A target's engine for tests, with hooks to watch it and to wait for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tandem.inference.feed import Feed
from tandem.inference.output import PassOutput
from tandem.speculation.request.sampling import Sampling
from tandem.verification import VERIFIERS
from target_svc.round import TargetRequest, TargetSequence
from tests.support.models.tiny import DrafterEngine, TargetEngine, make_target, random_llama
from tests.support.waiting import until

VOCAB_SIZE = 31
CONCURRENT = 16
CHUNK = 16


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def target_engine(**options: Any) -> TargetEngine:
    return make_target(random_llama(1, VOCAB_SIZE), **options)


def target_sequence(prompt: Sequence[int]) -> TargetSequence:
    return TargetSequence(list(prompt), TargetRequest(Sampling(), VERIFIERS["token"]))


def watch(engine: TargetEngine | DrafterEngine, before: Callable[[Sequence[Feed]], None]) -> None:
    """Call `before` in the engine thread before each forward pass."""
    forward = engine.decoder.forward

    def watched(feeds: Sequence[Feed]) -> PassOutput:
        before(feeds)
        return forward(feeds)

    engine.decoder.forward = watched  # type: ignore[method-assign]


async def emptied(engine: TargetEngine | DrafterEngine) -> None:
    """Wait until all memory is reclaimed, which happens between two steps."""
    pool = engine.decoder.pool
    await until(lambda: pool.free_positions == pool.positions)
