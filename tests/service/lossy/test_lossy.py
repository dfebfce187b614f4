"""Rules that change the law of a text are refused unless allowed, and named where they decide."""

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
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.tools.cli.display.text import summary_line
from tandem.verification import LOSSY_VERIFIERS
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.service.conftest import address_of, connect, start
from tests.support.wire.fakes import generation

LOSSY = "lossy_typical"


class Served:
    """The random pair, served through an orchestrator."""

    def __init__(self, stub: Any, target: Any) -> None:
        self.stub, self.target = stub, target

    async def complete(self, temperature: float = 1.0, **speculation: Any) -> pb.CompleteResponse:
        message = generation(
            stopping={"max_new_tokens": 24, "ignore_eos": True},
            sampling={"seed": 4, "temperature": temperature},
            speculation={"gamma": 3, **speculation},
        )
        reply: pb.CompleteResponse = await self.stub.Complete(
            pb.CompleteRequest(generation=message)
        )
        return reply


async def served(stack: AsyncExitStack, pair: tuple[Path, Path], **settings: Any) -> Served:
    small, large = map(str, pair)
    drafter = await start(stack, make_drafter(DrafterSettings(model=small)))
    target = await start(stack, make_target(TargetSettings(model=large)))
    own = OrchestratorSettings(
        drafters=(address_of(drafter),),
        targets=(address_of(target),),
        stage_floor_seconds=60.0,
        draft_seconds=60.0,
        **settings,
    )
    server = await start(stack, make_orchestrator(own))
    await server.ready()
    public, there = [await connect(stack, address_of(each)) for each in (server, target)]
    return Served(
        orchestrator_pb2_grpc.OrchestratorServiceStub(public),
        target_pb2_grpc.TargetServiceStub(there),
    )


async def test_a_lossy_rule_is_refused_unless_it_is_allowed(
    random_pair: tuple[Path, Path],
) -> None:
    async with AsyncExitStack() as stack:
        pair = await served(stack, random_pair)
        info = await pair.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert LOSSY not in info.verifiers
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.complete(verifier=LOSSY)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "a lossy rule needs ALLOW_LOSSY=true" in (caught.value.details() or "")
        # The target says of each rule what it does.
        reply = await pair.target.GetModelInfo(target_pb2.GetModelInfoRequest())
        lossy = [each for each in reply.verifiers if not each.lossless]
        assert {rule.name: [option.name for option in rule.options] for rule in lossy} == {
            LOSSY: ["epsilon", "delta"],
            "lossy_topk_gap": ["beta", "tau"],
            "lossy_fallback": ["alpha"],
        }
        assert not {rule.name for rule in lossy} & set(info.verifiers)


async def test_where_it_is_allowed_it_is_named(random_pair: tuple[Path, Path]) -> None:
    async with AsyncExitStack() as stack:
        pair = await served(stack, random_pair, allow_lossy=True)
        info = await pair.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert LOSSY in info.verifiers
        # Nothing is asked of a token: all that is drafted is kept.
        reply = await pair.complete(verifier=LOSSY, verifier_options={"epsilon": 0.0})
        told = reply.summary.effective.speculation
        assert told.verifier == LOSSY
        assert dict(told.verifier_options) == pytest.approx({"epsilon": 0.0, "delta": 0.3})
        assert reply.summary.accepted_tokens == reply.summary.drafted_tokens > 0
        assert "lossy_typical: not the target's law" in summary_line(reply.summary, 1.0)
        strict = await pair.complete(
            verifier=LOSSY, verifier_options={"epsilon": 1.0, "delta": 1.0}
        )
        assert strict.summary.accepted_tokens < strict.summary.drafted_tokens
        exact = await pair.complete(verifier="block")
        assert not exact.summary.effective.speculation.verifier_options
        assert "lossy" not in summary_line(exact.summary, 1.0)


async def test_at_temperature_0_texts_are_plain(random_pair: tuple[Path, Path]) -> None:
    async with AsyncExitStack() as stack:
        pair = await served(stack, random_pair, allow_lossy=True)
        plain = await pair.complete(0.0, gamma=0)
        for name in LOSSY_VERIFIERS:
            mine = await pair.complete(0.0, verifier=name)
            assert list(mine.token_ids) == list(plain.token_ids)
            assert mine.summary.drafted_tokens > 0
        # Only the likeliest token passes, and is what comes without a draft, too.
        greedy = await pair.complete(verifier="lossy_topk_gap", verifier_options={"beta": 1.0})
        assert list(greedy.token_ids) == list(plain.token_ids)


@pytest.mark.parametrize(
    ("speculation", "sentence"),
    [
        (
            {"verifier": LOSSY, "verifier_options": {"epsilon": 1.5}},
            "verifier_options: epsilon must be 0..1, got 1.5",
        ),
        (
            {"verifier": LOSSY, "verifier_options": {"gap": 1}},
            "verifier_options: no 'gap', lossy_typical has ['epsilon', 'delta']",
        ),
        (
            {"verifier": "token", "verifier_options": {"epsilon": 0.1}},
            "verifier_options: no 'epsilon', token has none",
        ),
    ],
)
async def test_bad_options_are_named(
    speculation: dict[str, Any], sentence: str, random_pair: tuple[Path, Path]
) -> None:
    async with AsyncExitStack() as stack:
        pair = await served(stack, random_pair, allow_lossy=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pair.complete(**speculation)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence in (caught.value.details() or "")
