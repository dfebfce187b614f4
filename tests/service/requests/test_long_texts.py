"""Texts that are too long for a drafter, over fake services and over real ones."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.support.wire.fakes import FakeDrafter, FakeTarget, orchestrate, request

# The target holds 1,000.
DRAFTED = 100


class Bounded(FakeDrafter):
    """Refuses to hold more than it said, as a real one does.

    Attributes:
        longest: text that it has drafted after or for, in tokens.
        ends: text that each opening announced.
    """

    def __init__(self) -> None:
        super().__init__(max_length=DRAFTED)
        self.longest, self.ends = 0, list[int]()

    def answer_to(self, request: Any, tokens: list[int]) -> Any:
        answer = super().answer_to(request, tokens)
        if request.HasField("open"):
            self.ends.append(len(tokens) + request.open.max_new_tokens)
        else:
            self.longest = max(self.longest, len(tokens) + request.draft.gamma)
        assert max(self.longest, *self.ends) <= DRAFTED
        return answer


@pytest.mark.parametrize("gamma", ["auto", 4])
@pytest.mark.parametrize("tokens", [DRAFTED - 1, DRAFTED, DRAFTED + 1, 3 * DRAFTED])
async def test_a_text_that_outgrows_its_drafter_goes_on_without_drafts(
    gamma: int | str, tokens: int
) -> None:
    drafter, target = Bounded(), FakeTarget(wraps=97)
    async with orchestrate(drafter, target, gamma=gamma) as stub:
        reply = await stub.Complete(
            request(stopping=pb.Stopping(max_new_tokens=tokens), speculation=pb.Speculation())
        )
    assert list(reply.token_ids) == target.text(tokens)
    assert (drafter.opened, target.opened) == (1, 1)
    assert not reply.summary.drafter_lost
    assert drafter.longest <= min(DRAFTED, tokens + 1)
    summary = reply.summary
    if gamma == 4:
        # Next to nothing is rejected: it was drafted as far as the drafter could hold it.
        assert drafter.longest >= min(DRAFTED, tokens) - 1
        assert tokens - summary.accepted_tokens - summary.rounds in (0, 1)
        assert summary.rounds < max(tokens - DRAFTED, 0) + DRAFTED / 4
        assert summary.undrafted_rounds == 0


async def test_a_prompt_as_long_as_a_drafter_begins_without_drafts() -> None:
    for length, opened in ((DRAFTED - 2, 1), (DRAFTED - 1, 0)):
        drafter, target = Bounded(), FakeTarget()
        async with orchestrate(drafter, target) as stub:
            reply = await stub.Complete(
                request(prompt_token_ids=[1] * length, stopping=None, speculation=None)
            )
        assert list(reply.token_ids) == target.text(256)
        assert (drafter.opened, target.opened) == (opened, 1)
        speculation = reply.summary.effective.speculation
        assert (speculation.HasField("gamma") and speculation.gamma == 0) == (not opened)


@pytest.mark.parametrize("received", [DRAFTED - 3, DRAFTED - 2, DRAFTED - 1, DRAFTED + 20])
async def test_a_text_that_is_resumed_past_its_drafter_has_none(received: int) -> None:
    drafter, target = Bounded(), FakeTarget(wraps=1000)
    token_ids = [1, *((2 + i) % 60 for i in range(received))]
    async with orchestrate(drafter, target, gamma=4) as stub:
        reply = await stub.Complete(
            request(
                prompt_token_ids=[1],
                received_token_ids=token_ids[1:],
                first_round=50,
                stopping=pb.Stopping(max_new_tokens=received + 30, ignore_eos=True),
                speculation=pb.Speculation(),
                sampling={"seed": 1},
            )
        )
    assert len(reply.token_ids) == 30
    assert drafter.opened == (received + 1 < DRAFTED)
    assert not reply.summary.drafter_lost


@pytest.mark.parametrize("gamma", ["auto", 4])
@pytest.mark.parametrize("tokens", [DRAFTED - 1, DRAFTED])
async def test_a_rule_that_needs_every_draft_has_none_of_a_text_that_is_too_long(
    gamma: int | str, tokens: int
) -> None:
    drafter, target = FakeDrafter(max_length=DRAFTED), FakeTarget()
    drafted = tokens < DRAFTED
    async with orchestrate(drafter, target, gamma=gamma) as stub:
        reply = await stub.Complete(
            request(
                stopping=pb.Stopping(max_new_tokens=tokens),
                speculation=pb.Speculation(verifier="greedy_block"),
            )
        )
    assert list(reply.token_ids) == target.text(tokens)
    assert drafter.opened == drafted
    assert (reply.summary.drafted_tokens > 0) == drafted
    speculation = reply.summary.effective.speculation
    assert (speculation.HasField("gamma") and speculation.gamma == 0) == (not drafted)
    assert not reply.summary.drafter_lost


@pytest.mark.parametrize(
    ("gamma", "tokens", "sentence"),
    [
        (4, 1000, "exceed the 1000 tokens that a sequence may hold beside drafts; gamma 0"),
        (0, 1000, "exceed the 1000 tokens that a sequence may hold"),
        (None, 1000, "exceed the 1000 tokens that a sequence may hold"),
    ],
)
async def test_drafts_that_were_asked_for_need_their_room(
    gamma: int | None, tokens: int, sentence: str
) -> None:
    drafter, target = FakeDrafter(max_length=DRAFTED), FakeTarget()
    asked: dict[str, Any] = {} if gamma is None else {"gamma": gamma}
    async with orchestrate(drafter, target) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(
                request(
                    stopping=pb.Stopping(max_new_tokens=tokens),
                    speculation=pb.Speculation(**asked),
                )
            )
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in str(refused.value.details())
    assert (drafter.opened, target.opened) == (0, 0)


async def test_a_seed_repeats_a_text_that_outgrows_its_drafter(
    random_pair: tuple[Path, Path],
) -> None:
    """And a greedy one is the target's own."""
    small, large = map(str, random_pair)
    async with AsyncExitStack() as stack:
        drafter = await start(stack, make_drafter(DrafterSettings(model=small, max_length=30)))
        target = await start(stack, make_target(TargetSettings(model=large, max_length=90)))
        own = OrchestratorSettings(
            drafters=(address_of(drafter),), targets=(address_of(target),), draft_seconds=60.0
        )
        server = await start(stack, make_orchestrator(own))
        await server.ready()
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(
            await connect(stack, address_of(server))
        )

        async def text(temperature: float, gamma: int) -> tuple[list[int], int]:
            message = request(
                prompt_token_ids=[1, 2, 3],
                stopping=pb.Stopping(max_new_tokens=80, ignore_eos=True),
                sampling={"seed": 5, "temperature": temperature},
                speculation=pb.Speculation(gamma=gamma),
            )
            reply = await stub.Complete(message)
            assert not reply.summary.drafter_lost
            return list(reply.token_ids), reply.summary.drafted_tokens

        first, drafted = await text(1.0, 3)
        assert (await text(1.0, 3)) == (first, drafted)
        assert 10 < drafted < 27 * 3
        greedy, drafted = await text(0.0, 3)
        assert (drafted > 0, greedy) == (True, (await text(0.0, 0))[0])
