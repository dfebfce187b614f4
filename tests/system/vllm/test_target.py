"""A target whose passes vLLM computes, through processes and real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tests.exactness import PATIENT, SMALLEST_P, Case, count_texts, target_law
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.tiny import VOCAB_SIZE
from tests.support.processes.services import Trio, generation, trio

MISSING = "vLLM is not installed; `make vllm-check` brings it"
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(find_spec("vllm") is None, reason=MISSING),
]
TEXTS = 3_000
VLLM = {"ENGINE": "vllm", "VLLM_EAGER": "true", "MAX_LENGTH": "512"}
DRAFTER = {"DRAFT_SUPPORT": "0", "MAX_SEQUENCES": "128"}
# Two blocks of vLLM's cache on a CPU, and some more.
LONG = [(7 * i + i // 3) % VOCAB_SIZE for i in range(300)]


@pytest.mark.parametrize("rule", ["block", "token"])
def test_the_law_is_the_targets(rule: str, vllm_pair: tuple[Path, Path], tmp_path: Path) -> None:
    drafter, target = vllm_pair
    law, others = target_law(target), target_law(drafter)
    with trio(
        tmp_path,
        drafter={"MODEL": str(drafter), **DRAFTER},
        target={"MODEL": str(target), **VLLM},
        orchestrator=PATIENT,
    ) as services:
        case = Case(rule, 3, "dense")
        counts = count_texts(services, case, range(TEXTS))
        assert chi_square_p_value(counts, law) > SMALLEST_P, case
        assert chi_square_p_value(counts, others) < SMALLEST_P, "the drafter's law would pass"
        services.wait_idle()


def test_a_wrong_rule_fails(vllm_pair: tuple[Path, Path], tmp_path: Path) -> None:
    drafter, target = vllm_pair
    with trio(
        tmp_path,
        drafter={"MODEL": str(drafter), **DRAFTER},
        target={"MODEL": str(target), **VLLM},
        orchestrator=PATIENT,
        target_module="tests.system.serving.mutant_target",
    ) as services:
        counts = count_texts(services, Case("block", 3, "dense"), range(TEXTS))
    assert chi_square_p_value(counts, target_law(target)) < SMALLEST_P


def texts_of(services: Trio, seeds: Sequence[int], prompt: list[int]) -> list[list[int]]:
    """Texts of 40 tokens, all at once: one in three without drafts, in runs."""

    async def all_of_them() -> list[list[int]]:
        async with grpc.aio.insecure_channel(services.orchestrator.address) as channel:
            stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)

            async def one(seed: int) -> list[int]:
                gamma = 0 if seed % 3 == 0 else 4
                message = generation(prompt, max_new_tokens=40, seed=seed, gamma=gamma)
                reply = await stub.Complete(pb.CompleteRequest(generation=message), timeout=300)
                return list(reply.token_ids)

            return list(await asyncio.gather(*map(one, seeds)))

    return asyncio.run(all_of_them())


def test_texts_are_the_same_however_they_are_computed(
    vllm_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    drafter, target = vllm_pair
    ways = {
        "torch": {"ENGINE": "torch"},
        "vllm": VLLM,
        "without a prefix cache": {**VLLM, "VLLM_PREFIX_CACHE": "false"},
        # Of sixteen texts four have room at a time.
        "a small cache": {**VLLM, "CACHE_TOKENS": "1536", "ADMISSION_SECONDS": "60"},
        "two ranks": {**VLLM, "VLLM_TENSOR_PARALLEL": "2"},
    }
    found = {}
    for name, settings in ways.items():
        with trio(
            tmp_path,
            drafter={"MODEL": str(drafter), **DRAFTER},
            target={"MODEL": str(target), **settings},
            orchestrator=PATIENT,
        ) as services:
            found[name] = [texts_of(services, range(16), prompt) for prompt in ([1, 2, 3], LONG)]
            services.wait_idle()
    for name, texts in found.items():
        assert texts == found["torch"], name
