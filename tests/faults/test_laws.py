"""The law of texts when each text loses its target, its drafter or its orchestrator on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafter_svc.sequence import DraftedSequence
from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.grpc import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.errors import Unavailable
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from target_svc.sequence import VerifiedSequence
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.exactness import CELLS, LENGTH, PROMPT, target_law
from tests.service.conftest import address_of, connect, start
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.tiny import VOCAB_SIZE
from tests.support.processes.services import generation

TEXTS = {"target": 500, "drafter": 1_000, "orchestrator": 300}
CONCURRENT = 48
# A sound service fails one of the four cases in 1,000 runs.
SMALLEST_P = 0.001 / 4
# Rounds enough that a second step always comes, with the law's tokens on both sides of the loss.
TOKENS = 8
GAMMA = 3

Stub = Any


class Deaths:
    """Kills one answer of each text: its opening's, its first step's or its second's.

    What was computed for it is lost with it, as where a process dies before it has answered.

    Attributes:
        texts: request ids of those that have had it.
    """

    def __init__(self, patch: pytest.MonkeyPatch, sequence: type[Any]) -> None:
        self.texts: set[str] = set()
        self._answers: dict[str, int] = {}
        for name in ("_open", "_step"):
            patch.setattr(sequence, name, self._mortal(getattr(sequence, name)))

    def _mortal(self, answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def answered(sequence: Any, message: Any, traced: Any) -> Any:
            reply = await answer(sequence, message, traced)
            text = sequence.request_id
            if text.isdecimal() and text not in self.texts:
                number = self._answers[text] = self._answers.get(text, -1) + 1
                if number == int(text) % 3:
                    self.texts.add(text)
                    raise Unavailable("killed")
            return reply

        return answered


@asynccontextmanager
async def served(pair: tuple[Path, Path]) -> AsyncIterator[Stub]:
    """Two drafters, two targets and an orchestrator in this process."""
    drafter, target = map(str, pair)
    async with AsyncExitStack() as stack:
        own = DrafterSettings(model=drafter, draft_support=0, draft_mass=1.0)
        drafters = [await start(stack, make_drafter(own)) for _ in range(2)]
        targets = [await start(stack, make_target(TargetSettings(model=target))) for _ in range(2)]
        settings = OrchestratorSettings(
            drafters=tuple(map(address_of, drafters)), targets=tuple(map(address_of, targets))
        )
        front = await start(stack, make_orchestrator(settings))
        await front.ready()
        channel = await connect(stack, address_of(front))
        yield orchestrator_pb2_grpc.OrchestratorServiceStub(channel)


async def plain(stub: Stub, asked: pb.Generation) -> list[int]:
    reply = await stub.Complete(pb.CompleteRequest(generation=asked), timeout=60)
    return list(reply.token_ids)


async def resumed(stub: Stub, asked: pb.Generation) -> list[int]:
    """Broken off behind the first round, or the second, and gone on with."""
    call = stub.Generate(pb.GenerateRequest(generation=asked), timeout=60)
    rounds = 1 + asked.sampling.seed % 2
    async for reply in call:
        asked.received_token_ids.extend(token.id for token in reply.round.tokens)
        asked.first_round = reply.round.round + 1
        rounds -= 1
        if not rounds:
            break
    call.cancel()
    return [*asked.received_token_ids, *await plain(stub, asked)]


async def counted(
    stub: Stub,
    verifier: str,
    texts: int,
    make: Callable[[Stub, pb.Generation], Awaitable[list[int]]] = plain,
) -> np.ndarray:
    """How often each beginning of a text came."""
    counts = np.zeros(CELLS, dtype=np.int64)
    weights = VOCAB_SIZE ** np.arange(LENGTH - 1, -1, -1)
    seeds = iter(range(texts))

    async def work() -> None:
        for seed in seeds:
            asked = generation(
                PROMPT, max_new_tokens=TOKENS, seed=seed, gamma=GAMMA, verifier=verifier
            )
            asked.request_id = str(seed)
            tokens = await make(stub, asked)
            assert len(tokens) == TOKENS
            counts[int(np.dot(weights, tokens[:LENGTH]))] += 1

    await asyncio.gather(*(work() for _ in range(CONCURRENT)))
    return counts


@pytest.mark.parametrize(
    ("victim", "verifier"),
    [
        ("target", "block"),
        pytest.param("target", "greedy_block", marks=pytest.mark.campaign),
        pytest.param("drafter", "block", marks=pytest.mark.campaign),
    ],
)
async def test_the_law_holds_where_each_text_loses_one(
    victim: str, verifier: str, random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What fails each text is held off ever longer: here it is to go on failing them.
    monkeypatch.setattr("orchestrator.replicas.breaker._AGAIN_SECONDS", 0.0)
    texts = TEXTS[victim] if verifier == "block" else 500
    deaths = Deaths(monkeypatch, {"target": VerifiedSequence, "drafter": DraftedSequence}[victim])
    async with served(random_pair) as stub:
        counts = await counted(stub, verifier, texts)
    # A text may find no drafter at all where those before it have just failed both.
    assert len(deaths.texts) > (texts - 1 if victim == "target" else 0.9 * texts)
    assert chi_square_p_value(counts, target_law(random_pair[1])) > SMALLEST_P


async def test_the_law_holds_where_each_text_is_resumed(random_pair: tuple[Path, Path]) -> None:
    async with served(random_pair) as stub:
        counts = await counted(stub, "block", TEXTS["orchestrator"], resumed)
    assert chi_square_p_value(counts, target_law(random_pair[1])) > SMALLEST_P
