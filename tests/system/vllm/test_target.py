"""A target whose passes vLLM computes, through processes and real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tests.exactness import PATIENT, PROMPT, SMALLEST_P, Case, count_texts, target_law
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.tiny import VOCAB_SIZE
from tests.support.processes.services import Trio, generation, trio

MISSING = "vLLM is not installed; `make vllm-check` brings it"
pytestmark = [
    pytest.mark.campaign(
        "a target by vLLM: the law through sockets, the same texts as with torch",
        "unit/inference/vllm; the same services with torch",
    ),
    pytest.mark.skipif(find_spec("vllm") is None, reason=MISSING),
]
TEXTS = 3_000
MASS = 0.99
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


def nucleus(logits: torch.Tensor) -> torch.Tensor:
    """[..., V] distributions at temperature 0.7, of the likeliest tokens that have `MASS`."""
    p = (logits / 0.7).softmax(-1)
    ordered, order = p.sort(-1, descending=True)
    kept = ordered * (ordered.cumsum(-1) - ordered < MASS)
    kept /= kept.sum(-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, order, kept)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_the_law_of_truncated_texts(
    rule: str, vllm_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Of three tokens, one by one and in pairs with what is before them."""
    drafter, target = vllm_pair
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    texts = torch.tensor(list(product(range(VOCAB_SIZE), repeat=3)))
    prompts = torch.tensor(PROMPT).expand(len(texts), -1)
    with torch.inference_mode():
        rows = nucleus(model(torch.cat((prompts, texts), 1)).logits[:, len(PROMPT) - 1 : -1])
    law = rows.gather(2, texts[..., None])[..., 0].prod(1).numpy()
    asked = generation(PROMPT, max_new_tokens=8, gamma=3, verifier=rule, temperature=0.7)
    asked.sampling.top_p = MASS
    with trio(
        tmp_path,
        drafter={"MODEL": str(drafter), **DRAFTER},
        target={"MODEL": str(target), **VLLM},
        orchestrator=PATIENT,
    ) as services:
        found = asyncio.run(replies(services, [with_seed(asked, n) for n in range(TEXTS)]))
    counts = np.zeros(len(texts), dtype=np.int64)
    for tokens in found:
        counts[np.dot(tokens[:3], VOCAB_SIZE ** np.arange(2, -1, -1))] += 1
    assert 8 < np.count_nonzero(law) < len(law)
    assert counts[law == 0].sum() == 0
    assert chi_square_p_value(counts, law) > SMALLEST_P


def with_seed(asked: pb.Generation, seed: int) -> pb.Generation:
    message = pb.Generation()
    message.CopyFrom(asked)
    message.sampling.seed = seed
    return message


async def replies(services: Trio, asked: Sequence[pb.Generation]) -> list[list[int]]:
    """The texts asked for, 64 at a time."""
    places = asyncio.Semaphore(64)
    async with grpc.aio.insecure_channel(services.orchestrator.address) as channel:
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)

        async def one(message: pb.Generation) -> list[int]:
            async with places:
                reply = await stub.Complete(pb.CompleteRequest(generation=message), timeout=300)
                return list(reply.token_ids)

        return list(await asyncio.gather(*map(one, asked)))


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

    asked = [
        generation(prompt, max_new_tokens=40, seed=seed, gamma=0 if seed % 3 == 0 else 4)
        for seed in seeds
    ]
    return asyncio.run(replies(services, asked))


def test_texts_are_the_same_however_they_are_computed(
    vllm_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    drafter, target = vllm_pair
    ways = {
        "torch": {"ENGINE": "torch"},
        "vllm": VLLM,
        "without a prefix cache": {**VLLM, "PREFIX_CACHE": "false"},
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


def test_clients_that_leave_leave_no_block_behind(
    vllm_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    drafter, target = vllm_pair

    async def leave(services: Trio, count: int) -> None:
        places = asyncio.Semaphore(16)
        async with grpc.aio.insecure_channel(services.orchestrator.address) as channel:
            stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)

            async def one(seed: int) -> None:
                gamma = 0 if seed % 3 == 0 else 4
                message = generation(LONG[seed % 7 :], max_new_tokens=80, seed=seed, gamma=gamma)
                async with places:
                    call = stub.Generate(pb.GenerateRequest(generation=message))
                    await call.read()
                    call.cancel()

            await asyncio.gather(*map(one, range(count)))

    with trio(
        tmp_path,
        drafter={"MODEL": str(drafter), **DRAFTER},
        # Four of these texts fill it: a block that is lost would soon be missed.
        target={"MODEL": str(target), **VLLM, "CACHE_TOKENS": "1536", "ADMISSION_SECONDS": "60"},
        orchestrator={**PATIENT, "QUEUE_SECONDS": "300"},
    ) as services:
        asyncio.run(leave(services, 500))
        services.wait_idle()
        assert all(len(text) == 40 for text in texts_of(services, range(16), LONG))
        services.wait_idle()
