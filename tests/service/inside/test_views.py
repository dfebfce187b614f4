"""A part of the target drafts inside of it, through sockets: the law of its texts, which are those
of a copy in a drafter of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.exactness import Case, counts_at, target_law
from tests.service.conftest import address_of, connect, start
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.tiny import random_llama, save_random_llama
from tests.support.wire.fakes import generation

LAYERS, EXIT, TOKENS, TEXTS = 4, 2, 16, 200
SMALLEST_P = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose upper layers change little, so that its exit is near it."""
    folder = tmp_path_factory.mktemp("deep")
    model: Any = random_llama(6, layers=LAYERS)
    with torch.no_grad():
        for layer in model.model.layers[EXIT:]:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    model.save_pretrained(folder)
    return folder


BESIDE = pytest.mark.campaign(
    "texts that a part of the target drafts in chains, or reviews over few keys, follow the law",
    "trees of a part, and chains over few keys (this file); unit/target/test_views.py: as a copy",
)


@pytest.fixture(params=[pytest.param("model", marks=BESIDE), "tree"])
async def servers(
    request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[bool, str, str]]:
    """Whether drafts are trees; and orchestrators: over a copy in a drafter, and over a target that
    drafts with its own first layers."""
    monkeypatch.setenv("TANDEM_DRAFTER_EXIT", str(EXIT))
    async with AsyncExitStack() as stack:
        found = []
        for inside in (False, True):
            monkeypatch.setenv("TANDEM_DRAFTER_MODEL", "@target" if inside else str(model))
            drafters: tuple[str, ...] = ()
            if not inside:
                copied = DrafterSettings(method=request.param, engine="torch")
                drafters = (address_of(await start(stack, make_drafter(copied))),)
            own = TargetSettings(
                model=str(model), engine="torch", drafts=request.param if inside else ""
            )
            target = await start(stack, make_target(own))
            settings = OrchestratorSettings(
                drafters=drafters,
                targets=(address_of(target),),
                draft_by="target" if inside else "drafters",
                stage_floor_seconds=60.0,
                draft_seconds=60.0,
            )
            server = await start(stack, make_orchestrator(settings))
            await server.ready()
            found.append(address_of(server))
        yield (request.param == "tree", *found)


async def test_texts_follow_the_law_and_are_those_of_a_copy(
    servers: tuple[bool, str, str], model: Path, tmp_path: Path
) -> None:
    trees, copied, inside = servers
    nodes = 6 if trees else 0
    counts = await counts_at(inside, Case("block", 3, "dense", nodes), range(TEXTS))
    assert chi_square_p_value(counts, target_law(model)) > SMALLEST_P
    other = save_random_llama(tmp_path / "other", 9)
    assert chi_square_p_value(counts, target_law(other)) < SMALLEST_P, "any law would pass"
    async with AsyncExitStack() as stack:
        stubs = [
            orchestrator_pb2_grpc.OrchestratorServiceStub(await connect(stack, address))
            for address in (copied, inside)
        ]
        accepted = 0
        for verifier in ("block", "token"):
            size = {"gamma": 3, "verifier": verifier} | ({"max_nodes": nodes} if trees else {})
            for seed, temperature in ((1, 1.0), (2, 0.0), (3, 0.7)):
                message = generation(
                    stopping={"max_new_tokens": TOKENS, "ignore_eos": True},
                    speculation=size,
                    sampling={"seed": seed, "temperature": temperature},
                )
                replies = [
                    await stub.Complete(pb.CompleteRequest(generation=message)) for stub in stubs
                ]
                texts = [list(reply.token_ids) for reply in replies]
                assert texts[0] == texts[1]
                assert len(texts[0]) == TOKENS
                accepted += replies[1].summary.accepted_tokens
    assert accepted > TOKENS


async def _over(stack: AsyncExitStack, target: Any) -> Any:
    """An orchestrator over a target that drafts."""
    settings = OrchestratorSettings(
        targets=(address_of(target),),
        draft_by="target",
        stage_floor_seconds=60.0,
        draft_seconds=60.0,
        queue_seconds=60.0,
    )
    server = await start(stack, make_orchestrator(settings))
    await server.ready()
    return server


_FEW = """
method = "{method}"
{part}model = "@target"
{part}kv = {{kind = "chunks", budget = 14, sink = 1, recent = 5, chunk = 2}}
"""


@pytest.mark.parametrize(
    ("method", "part", "inner"),
    [
        ("model", "", ""),
        pytest.param(
            "cascade",
            "reviewer.",
            'inner = {method = "model", kv = {kind = "window", budget = 8, sink = 1}}',
            marks=BESIDE,
        ),
    ],
    ids=["model", "cascade"],
)
async def test_texts_drafted_over_few_keys_follow_the_law(
    method: str,
    part: str,
    inner: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", str(model))
    (tmp_path / "recipe.toml").write_text(_FEW.format(method=method, part=part) + inner)
    async with AsyncExitStack() as stack:
        own = TargetSettings(model=str(model), engine="torch", drafts=str(tmp_path / "recipe.toml"))
        target = await start(stack, make_target(own))
        server = await _over(stack, target)
        counts = await counts_at(address_of(server), Case("block", 3, "dense"), range(TEXTS))
        assert chi_square_p_value(counts, target_law(model)) > SMALLEST_P
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(
            await connect(stack, address_of(server))
        )
        message = generation(
            prompt_token_ids=[1, 0, 3, 2] * 9,
            stopping={"max_new_tokens": 100, "ignore_eos": True},
            speculation={"gamma": 3},
        )
        summary = (await stub.Complete(pb.CompleteRequest(generation=message))).summary
        assert 0.2 < summary.accepted_tokens / summary.drafted_tokens < 1
        refused = generation(speculation={"verifier": "greedy_block", "gamma": 3})
        with pytest.raises(grpc.aio.AioRpcError, match=r"'greedy_block' .* not suit"):
            await stub.Complete(pb.CompleteRequest(generation=refused))


GIVEN_BACK = pytest.mark.campaign(
    "texts that a part of the target drafts are the same where some are given back and moved",
    "unit/target/test_views.py; service/replicas/test_given_back.py: with drafts of a drafter",
)


@GIVEN_BACK
@pytest.mark.parametrize("drafts", ["model", "tree", "few"])
async def test_texts_that_are_given_back_are_those_of_plain_decoding(
    drafts: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_DRAFTER_MODEL", "@target")
    recipe = drafts
    if drafts == "few":
        (tmp_path / "recipe.toml").write_text(_FEW.format(method="model", part=""))
        recipe = str(tmp_path / "recipe.toml")
    else:
        monkeypatch.setenv("TANDEM_DRAFTER_EXIT", str(EXIT))
    async with AsyncExitStack() as stack:
        own = TargetSettings(
            model=str(model),
            engine="torch",
            drafts=recipe,
            cache_tokens=1200,
            max_length=400,
            overcommit=3.0,
            max_sequences=16,
        )
        target = await start(stack, make_target(own))
        server = await _over(stack, target)
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(
            await connect(stack, address_of(server))
        )

        async def text(number: int, gamma: int) -> tuple[list[int], pb.Summary]:
            length = 20 + 13 * number % 60
            size = {"gamma": gamma} | ({"max_nodes": 8} if drafts == "tree" and gamma else {})
            message = generation(
                prompt_token_ids=[(number**2 + 3 * n * n + n) % 5 for n in range(length)],
                sampling={"temperature": 0.0},
                stopping={"max_new_tokens": 150 + 37 * number % 120, "ignore_eos": True},
                speculation=size,
            )
            reply = await stub.Complete(pb.CompleteRequest(generation=message))
            return list(reply.token_ids), reply.summary

        plain = [(await text(number, 0))[0] for number in range(14)]
        drafted = await asyncio.gather(*(text(number, 3) for number in range(14)))
    assert [ids for ids, _ in drafted] == plain
    assert sum(summary.given_back for _, summary in drafted)
    assert sum(summary.accepted_tokens for _, summary in drafted) > 14 * 50
