"""Recipes beyond the table's built-in ones, through real sockets: the law, and greedy texts."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from drafter_svc.servicer import make_service as make_drafter
from drafter_svc.settings import DrafterSettings
from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.retrieval.build import write_index
from target_svc.servicer import make_service as make_target
from target_svc.settings import TargetSettings
from tests.exactness import Case, counts_at, target_law
from tests.service.conftest import address_of, connect, start
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.tiny import VOCAB_SIZE
from tests.support.wire.fakes import generation

TEXTS = 500
SMALLEST_P = 1e-4
CASCADE = """
method = "cascade"
rule = "token"
tokens = 2
[inner]
method = "horizontal"
tokens = [1]
[[inner.parts]]
method = "model"
model = "{large}"
skip = "{skip}"
[[inner.parts]]
method = "lookup"
"""
RETRIEVAL = """
method = "retrieval"
stores = ["prompt", "corpus"]
index = "{index}"
max_nodes = 6
"""
PART = """
method = "model"
model = "{large}"
skip = "{skip}"
stop = "adaptive"
threshold = 0.3
"""
RECIPES = {"cascade": (CASCADE, 0), "retrieval": (RETRIEVAL, 6), "part, adaptive": (PART, 0)}


def recipe_in(folder: Path, text: str, large: Path) -> str:
    """A recipe's file, with what it names."""
    skip, index = folder / "skip.json", folder / "index"
    skip.write_text(json.dumps({"attention": [], "mlp": [0]}))
    rng = np.random.default_rng(1)
    write_index(index, rng.integers(VOCAB_SIZE, size=400), VOCAB_SIZE, "")
    file = folder / "recipe.toml"
    file.write_text(text.format(large=large, skip=skip, index=index))
    return str(file)


@pytest.mark.parametrize("name", RECIPES)
async def test_texts_follow_the_targets_law(
    name: str, random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    text, nodes = RECIPES[name]
    small, large = random_pair
    settings = DrafterSettings(recipe=recipe_in(tmp_path, text, large), model=str(small))
    async with AsyncExitStack() as stack:
        drafter = await start(stack, make_drafter(settings))
        target = await start(stack, make_target(TargetSettings(model=str(large))))
        server = await start(
            stack,
            make_orchestrator(
                OrchestratorSettings(
                    drafters=(address_of(drafter),),
                    targets=(address_of(target),),
                    stage_floor_seconds=60.0,
                    draft_seconds=60.0,
                )
            ),
        )
        await server.ready()
        case = Case("block", 3, "dense", nodes)
        counts = await counts_at(address_of(server), case, range(TEXTS))
        assert chi_square_p_value(counts, target_law(large)) > SMALLEST_P
        assert chi_square_p_value(counts, target_law(small)) < SMALLEST_P, (
            "the drafter's would pass"
        )
        channel = await connect(stack, address_of(server))
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        for prompt in range(1, VOCAB_SIZE):
            texts = []
            for gamma in (0, 3):
                size = {"max_nodes": nodes} if nodes and gamma else {}
                message = generation(
                    prompt_token_ids=[prompt, 2],
                    sampling={"temperature": 0.0},
                    stopping={"max_new_tokens": 24, "ignore_eos": True},
                    speculation={"gamma": gamma, **size},
                )
                reply = await stub.Complete(pb.CompleteRequest(generation=message))
                texts.append(list(reply.token_ids))
                assert bool(reply.summary.drafted_tokens) == bool(gamma)
            assert texts[0] == texts[1]
