"""Drafts with probes where drafters come and go: there is room for them where they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.support.models.probes import extra_rows
from tests.support.wire.fakes import generation

TOKENS = 24


async def served(
    stack: AsyncExitStack,
    model: Path,
    folder: Path,
    drafters: Sequence[str],
    inside: str = "",
    **target: Any,
) -> tuple[Any, list[Any]]:
    """An orchestrator's stub, and the running drafters."""
    running = [await start(stack, make_drafter(DrafterSettings(method=name))) for name in drafters]
    settings = TargetSettings(
        model=str(model), drafts=inside, extra_embeddings=extra_rows(folder, model, 4), **target
    )
    own = await start(stack, make_target(settings))
    front = await start(
        stack,
        make_orchestrator(
            OrchestratorSettings(
                drafters=tuple(address_of(one) for one in running),
                targets=(address_of(own),),
                stage_floor_seconds=60.0,
                draft_seconds=60.0,
            )
        ),
    )
    await front.ready()
    channel = await connect(stack, address_of(front))
    return orchestrator_pb2_grpc.OrchestratorServiceStub(channel), running


async def text(stub: Any, gamma: int = 3, tokens: int = TOKENS, **speculation: Any) -> Any:
    message = generation(
        sampling={"temperature": 0.0},
        stopping={"max_new_tokens": tokens, "ignore_eos": True},
        speculation={"gamma": gamma, **speculation},
    )
    return await stub.Complete(pb.CompleteRequest(generation=message))


@pytest.mark.parametrize("inside", ["masks", "lookahead", "jacobi"])
async def test_a_text_that_loses_its_drafter_goes_on_with_the_targets_own(
    inside: str, random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        with capture_logs():
            stub, (drafter,) = await served(stack, random_pair[1], tmp_path, ["lookup"], inside)
            plain = await text(stub, 0)
            before = await text(stub)
            await drafter.stop(0)
            after = await text(stub)
        texts = [list(reply.token_ids) for reply in (plain, before, after)]
        assert texts[0] == texts[1] == texts[2]


async def test_drafters_with_and_without_feedback_serve_beside_each_other(
    random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        stub, _ = await served(stack, random_pair[1], tmp_path, ["lookup", "jacobi"])
        for _ in range(6):  # both get some
            summary = (await text(stub)).summary
            assert not summary.drafter_lost


async def test_a_plain_text_holds_no_room_for_probes(
    random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        stub, _ = await served(
            stack, random_pair[1], tmp_path, ["masks"], cache_tokens=64, max_length=64
        )
        reply = await text(stub, 0, 50)
        assert len(reply.token_ids) == 50
        drafted = await text(stub, 3, 20)
        assert drafted.summary.rounds < 20 or drafted.summary.drafted_tokens
