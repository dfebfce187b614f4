"""Texts that a head drafts go on when its service, or the target, is lost; then it drafts again."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.sequence import DraftedSequence
from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.errors import Unavailable
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from target_svc.sequence import VerifiedSequence
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.support.models.heads import save_random_head
from tests.support.processes.services import generation

PROMPT, TOKENS, KILLED = [1, 2, 0, 3], 40, 4


async def serve(stack: AsyncExitStack, method: str, pair: tuple[Path, Path]) -> Any:
    """An orchestrator's stub, over two drafters with a head and two targets."""
    target = str(pair[1])
    head = str(save_random_head(pair[0].parent / f"{method}-lost", method, pair[1]))
    small = DrafterSettings(method=method, model=head, target=target)
    large = TargetSettings(model=target, feedback="last", engine="torch")
    drafters = [address_of(await start(stack, make_drafter(small))) for _ in range(2)]
    targets = [address_of(await start(stack, make_target(large))) for _ in range(2)]
    settings = OrchestratorSettings(
        drafters=tuple(drafters),
        targets=tuple(targets),
        stage_floor_seconds=60.0,
        draft_seconds=60.0,
    )
    front = await start(stack, make_orchestrator(settings))
    await front.ready()
    channel = await connect(stack, address_of(front))
    return orchestrator_pb2_grpc.OrchestratorServiceStub(channel)


def asked(gamma: int) -> pb.CompleteRequest:
    sizes = {"gamma": gamma} | ({"max_nodes": 6} if gamma else {})
    message = generation(
        PROMPT, seed=1, temperature=0.0, max_new_tokens=TOKENS, verifier="block", **sizes
    )
    return pb.CompleteRequest(generation=message)


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle"])
async def test_a_text_goes_on_with_another_target(
    method: str, random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = VerifiedSequence._step
    killed: list[int] = []

    async def mortal(self: VerifiedSequence, message: Any, traced: Any) -> Any:
        reply = await answer(self, message, traced)
        if message.verify.round == KILLED and not killed:
            killed.append(KILLED)
            raise Unavailable("killed")
        return reply

    monkeypatch.setattr(VerifiedSequence, "_step", mortal)
    async with AsyncExitStack() as stack:
        stub = await serve(stack, method, random_pair)
        plain = await stub.Complete(asked(0))
        drafted = await stub.Complete(asked(3))
    assert killed
    assert list(drafted.token_ids) == list(plain.token_ids)
    # What was lost is known to the other target, so no draft is missing.
    assert all(list(drafted.summary.gammas)[KILLED + 2 : -2])


@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle"])
async def test_a_drafter_that_opens_late_drafts_from_its_second_step_on(
    method: str, random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first step may lack the newest states: nobody asked for them while there was none."""
    answer, begin, verify = DraftedSequence._step, DraftedSequence._open, VerifiedSequence._step
    opened: list[DraftedSequence] = []
    drafted: list[int] = []
    back = asyncio.Event()

    async def opens(self: DraftedSequence, message: Any, traced: Any) -> Any:
        reply = await begin(self, message, traced)
        if len(message.open.token_ids) >= len(PROMPT):  # else it is a probe of the lost one
            opened.append(self)
            if len(opened) > 1:
                back.set()
        return reply

    async def mortal(self: DraftedSequence, message: Any, traced: Any) -> Any:
        reply = await answer(self, message, traced)
        if self is opened[0] and message.draft.round == KILLED:
            raise Unavailable("killed")
        if self in opened[1:]:
            drafted.append(len(reply.message.drafted.draft.token_ids))  # type: ignore[union-attr]
        return reply

    async def patient(self: VerifiedSequence, message: Any, traced: Any) -> Any:
        if (
            max(message.verify.round, message.run.round) > KILLED
        ):  # however slow the machine, some rounds are left
            await back.wait()
        return await verify(self, message, traced)

    async with AsyncExitStack() as stack:
        stub = await serve(stack, method, random_pair)
        plain = await stub.Complete(asked(0))
        opened.clear()
        monkeypatch.setattr(DraftedSequence, "_open", opens)
        monkeypatch.setattr(DraftedSequence, "_step", mortal)
        monkeypatch.setattr(VerifiedSequence, "_step", patient)
        found = await stub.Complete(asked(3))
    assert list(found.token_ids) == list(plain.token_ids)
    assert len(opened) == 2
    assert len(drafted) > 2
    assert all(drafted[1:])
