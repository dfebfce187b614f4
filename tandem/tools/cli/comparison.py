"""The same texts with and without speculation, taking turns on one stack."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tandem.client.connection import Connection, sampled
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.method import BLOCK, PLAIN, TOKEN, Method
from tandem.tools.load.requests import PROMPTS

TEMPERATURES = (0.0, 1.0)
METHODS = (PLAIN, TOKEN, BLOCK)
_WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Turn:
    """One text of the plan."""

    repeat: int
    prompt: str
    temperature: float
    method: Method

    @property
    def seed(self) -> int:
        """The same for each method."""
        return self.repeat * len(PROMPTS) + PROMPTS.index(self.prompt)


@dataclass(frozen=True)
class TurnResult:
    """The result of a turn.

    Attributes:
        turn: of the plan.
        wall_s: from the call to its last message.
        token_ids: of the text.
        summary: the last message.
    """

    turn: Turn
    wall_s: float
    token_ids: tuple[int, ...]
    summary: pb.Summary


def plan(repeats: int) -> list[list[Turn]]:
    """One group for each prompt and repeat: every method and temperature, taking turns.

    A slow minute then slows all methods alike, and a plan cut between groups stays fair.
    """
    return [
        [
            Turn(repeat, prompt, temperature, method)
            for temperature in TEMPERATURES
            for method in METHODS
        ]
        for repeat in range(repeats)
        for prompt in PROMPTS
    ]


def compare(
    client: Connection, groups: Sequence[Sequence[Turn]], new_tokens: int, budget_s: float
) -> Iterator[list[TurnResult]]:
    """Run a plan, group by group.

    First, one short text per method warms up the services, and is traced.

    Args:
        client: of the stack.
        groups: the plan; at least its first one is run.
        new_tokens: of each text.
        budget_s: a further group starts only if it is likely to end within this time.
    """
    for method in METHODS:
        warm_up = Turn(0, PROMPTS[0], 1.0, method)
        _run(client, warm_up, min(new_tokens, _WARM_UP_TOKENS), traced=True)
    started = time.perf_counter()
    for done, group in enumerate(groups):
        spent = time.perf_counter() - started
        if done and spent * (done + 1) / done > budget_s:
            return
        yield [_run(client, turn, new_tokens, traced=False) for turn in group]


def _run(client: Connection, turn: Turn, new_tokens: int, traced: bool) -> TurnResult:
    generation = turn.method.request(turn.prompt, turn.temperature, turn.seed, new_tokens)
    token_ids: list[int] = []
    summary = pb.Summary()
    started = time.perf_counter()
    for reply in client.generate(generation, metadata=sampled(traced)):
        token_ids += [token.id for token in reply.round.tokens]
        summary.MergeFrom(reply.summary)
    return TurnResult(turn, time.perf_counter() - started, tuple(token_ids), summary)


def first_difference(samples: Sequence[TurnResult]) -> str | None:
    """Where a greedy text first differs from plain decoding's; None if all are equal."""
    plain: dict[str, tuple[int, ...]] = {}
    greedy = [sample for sample in samples if sample.turn.temperature == 0]
    for sample in sorted(greedy, key=lambda sample: METHODS.index(sample.turn.method)):
        turn = sample.turn
        expected = plain.setdefault(turn.prompt, sample.token_ids)
        if sample.token_ids == expected:
            continue
        pairs = zip(sample.token_ids, expected, strict=False)
        place = next((i for i, (got, want) in enumerate(pairs) if got != want), len(expected))
        return f"prompt {turn.prompt!r} with {turn.method}, from token {place} on"
    return None
