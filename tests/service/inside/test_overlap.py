"""A target whose layers overlap, through sockets: its texts, their law, and what it counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from orchestrator.front.service import make_service as make_orchestrator
from orchestrator.settings import OrchestratorSettings
from tandem.inference.loading.shared_layers import CYCLES
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from target_svc.servicer import TargetServicer, service_of
from target_svc.settings import TargetSettings
from tests.exactness import Case, counts_at, target_law
from tests.service.conftest import address_of, connect, start
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.tiny import random_llama, save_random_llama
from tests.support.wire.fakes import generation

LAYERS, TOKENS, TEXTS = 4, 24, 200
SMALLEST_P = 1e-4


def save_shared_llama(folder: Path, seed: int, cycles: int, layers: int) -> None:
    """A checkpoint whose layers are used several times, as its files have it."""
    model: Any = random_llama(seed, layers=layers // cycles)
    model.config.num_hidden_layers = layers
    setattr(model.config, CYCLES, cycles)
    model.save_pretrained(folder)


@pytest.fixture(scope="module", params=["exit", "cycles"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose upper layers change little, or which uses one layer four times."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "cycles":
        save_shared_llama(folder, 6, LAYERS, LAYERS)
        return folder
    found: Any = random_llama(6, layers=LAYERS)
    with torch.no_grad():
        for layer in found.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(0.3)
            layer.mlp.down_proj.weight.mul_(0.3)
    found.save_pretrained(folder)
    return folder


@pytest.fixture
async def servers(model: Path) -> AsyncIterator[tuple[list[str], TargetServicer]]:
    """Orchestrators without a drafter: over a target of whole passes, and over one whose layers
    overlap; and that one."""
    shared = model.name.startswith("cycles")
    how: dict[str, Any] = {"overlap": "cycles"} if shared else {"overlap": "2"}
    if not shared:
        how["overlap_guesses"] = 2
    async with AsyncExitStack() as stack:
        addresses = []
        for own in ({}, how):
            servicer = TargetServicer(TargetSettings(model=str(model), engine="torch", **own))
            target = await start(stack, service_of(servicer))
            server = await start(
                stack,
                make_orchestrator(OrchestratorSettings(drafters=(), targets=(address_of(target),))),
            )
            await server.ready()
            addresses.append(address_of(server))
        yield addresses, servicer


async def test_texts_are_those_of_whole_passes_and_follow_the_law(
    servers: tuple[list[str], TargetServicer], model: Path, tmp_path: Path
) -> None:
    addresses, servicer = servers
    overlap = servicer.loaded.overlap
    assert overlap is not None
    found = {True: 0, False: 0}

    def count(right: bool) -> None:
        found[right] += 1

    overlap.on_guess = count
    counts = await counts_at(addresses[1], Case("block", 0, "dense"), range(TEXTS))
    assert chi_square_p_value(counts, target_law(_whole(model, tmp_path))) > SMALLEST_P
    other = save_random_llama(tmp_path / "other", 9)
    assert chi_square_p_value(counts, target_law(other)) < SMALLEST_P, "any law would pass"
    assert min(found.values()) > TEXTS // 6
    async with AsyncExitStack() as stack:
        stubs = [
            orchestrator_pb2_grpc.OrchestratorServiceStub(await connect(stack, address))
            for address in addresses
        ]
        for seed, temperature in ((1, 1.0), (2, 0.0), (3, 0.7)):
            message = generation(
                stopping={"max_new_tokens": TOKENS, "ignore_eos": True},
                speculation={"gamma": 0},
                sampling={"seed": seed, "temperature": temperature},
            )
            replies = [
                await stub.Complete(pb.CompleteRequest(generation=message)) for stub in stubs
            ]
            texts = [list(reply.token_ids) for reply in replies]
            assert texts[0] == texts[1]
            assert len(texts[0]) == TOKENS


def _whole(model: Path, tmp_path: Path) -> Path:
    """A checkpoint with all layers, as `transformers` reads it."""
    if not model.name.startswith("cycles"):
        return model
    whole: Any = random_llama(6, layers=LAYERS)
    stored = random_llama(6, layers=1).state_dict()
    whole.load_state_dict(
        {
            name: stored[".".join(["0" if part.isdigit() else part for part in name.split(".")])]
            for name in whole.state_dict()
        }
    )
    whole.save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


def test_another_reader_misses_the_shared_weights(tmp_path: Path) -> None:
    save_shared_llama(tmp_path, 6, LAYERS, LAYERS)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert any("layers.3" in name for name in report["missing_keys"])
