"""A method and a rule of other packages, as docs/extending.md has them, through real sockets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.service.recipes.served_law import greedy_summaries
from tests.support.installed_packages import install_examples, on_path
from tests.support.wire.fakes import generation

METHOD, RULE = "tandem_repeat", "tandem_lenient"


@pytest.fixture(autouse=True)
def examples(tmp_path: Path) -> Iterator[None]:
    with on_path(tmp_path, METHOD, RULE):
        install_examples(tmp_path)
        yield


async def test_texts_with_the_method_follow_the_targets_law(random_pair: tuple[Path, Path]) -> None:
    small, large = random_pair
    target = TargetSettings(model=str(large))
    found = await greedy_summaries(DrafterSettings(method="repeat"), target, small, 0)
    assert all(summary.drafted_tokens for summary in found)
    assert any(summary.accepted_tokens for summary in found)
    assert RULE not in sys.modules


class Served:
    """A target that drafts by `repeat` itself, after an orchestrator."""

    def __init__(self, stub: Any) -> None:
        self.stub = stub

    async def text(self, temperature: float = 1.0, **speculation: Any) -> pb.CompleteResponse:
        message = generation(
            stopping={"max_new_tokens": 48, "ignore_eos": True},
            sampling={"seed": 4, "temperature": temperature},
            speculation={"gamma": 3, **speculation},
        )
        reply: pb.CompleteResponse = await self.stub.Complete(
            pb.CompleteRequest(generation=message)
        )
        return reply


async def served(stack: AsyncExitStack, model: Path, *verifiers: str) -> Served:
    settings = TargetSettings(model=str(model), drafts="repeat", verifiers=verifiers)
    target = await start(stack, make_target(settings))
    own = OrchestratorSettings(
        targets=(address_of(target),), allow_lossy=True, stage_floor_seconds=60.0
    )
    server = await start(stack, make_orchestrator(own))
    await server.ready()
    channel = await connect(stack, address_of(server))
    return Served(orchestrator_pb2_grpc.OrchestratorServiceStub(channel))


async def test_the_rule_decides_where_it_is_named(random_pair: tuple[Path, Path]) -> None:
    async with AsyncExitStack() as stack:
        target = await served(stack, random_pair[1], "lossy_lenient")
        info = await target.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert "lossy_lenient" in info.verifiers
        plain = await target.text(0.0, gamma=0)
        greedy = await target.text(0.0, verifier="lossy_lenient")
        assert list(greedy.token_ids) == list(plain.token_ids)
        assert greedy.summary.drafted_tokens > 0
        # With the factor 1 it is the rule `token`; the larger the factor, the more is accepted.
        token = await target.text(verifier="token")
        texts = [
            await target.text(verifier="lossy_lenient", verifier_options={"factor": factor})
            for factor in (1.0, 100.0)
        ]
        assert list(texts[0].token_ids) == list(token.token_ids)
        strict, lenient = (
            text.summary.accepted_tokens / text.summary.drafted_tokens for text in texts
        )
        assert lenient > strict


async def test_a_request_loads_no_rule(random_pair: tuple[Path, Path]) -> None:
    async with AsyncExitStack() as stack:
        target = await served(stack, random_pair[1])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await target.text(verifier="lossy_lenient")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert RULE not in sys.modules
