"""A published model's texts are those of transformers: by each dtype and engine, placement and
drafter, as messages and as chats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tests.exactness import PATIENT
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.greedy import Reference, references, texts_of
from tests.support.processes.services import Trio, generation, trio
from tests.system.published.conftest import QUESTIONS, TOKENS

pytestmark = [
    pytest.mark.campaign(
        "texts of a published model, in each dtype, by each engine and placement",
        "unit/inference/passes: the parity of every architecture",
    ),
    pytest.mark.timeout(1800),
]

MAX_LENGTH = {"MAX_LENGTH": "4096"}
# Most of its 30 layers: fewer agree with it on little.
OWN_LAYERS = {"EXIT": "26"}
TEXTS, TOP_K, SMALLEST_P = 2000, 8, 1e-3


def texts(
    services: Trio, wanted: Sequence[Reference], gamma: int, nodes: int | None = None
) -> list[list[int]]:
    address = services.orchestrator.address
    return asyncio.run(texts_of(address, list(wanted), TOKENS, "block", gamma, nodes))


def computed_by(engine: str, dtype: str, logs: Path) -> bool:
    """Whether a target's log says so."""
    lines = [json.loads(line) for line in (logs / "target.log").read_text().splitlines()]
    return any((line.get("engine"), line.get("dtype")) == (engine, dtype) for line in lines)


def differing(wanted: Sequence[Reference], found: Sequence[list[int]]) -> list[str]:
    both = zip(wanted, found, strict=True)
    return [said for reference, text in both if (said := reference.difference(text))]


@pytest.fixture(scope="module")
def drafters(checkpoint: Path, untrained: Path) -> dict[str, dict[str, str]]:
    """Each drafter's settings."""
    return {
        "lookup": {"METHOD": "lookup", "MODEL": ""},
        "own layers": {"MODEL": str(checkpoint), **OWN_LAYERS},
        "untrained": {"MODEL": str(untrained)},
        "tree": {"METHOD": "tree", "MODEL": str(checkpoint), **OWN_LAYERS},
    }


@pytest.mark.parametrize("inside", [False, True], ids=["three processes", "inside"])
@pytest.mark.parametrize("name", ["lookup", "own layers", "untrained", "tree"])
def test_greedy_texts_in_float32(
    name: str,
    inside: bool,
    checkpoint: Path,
    drafters: dict[str, dict[str, str]],
    wanted: list[Reference],
    tmp_path: Path,
) -> None:
    drafter = drafters[name] | MAX_LENGTH
    target = {"MODEL": str(checkpoint), "ENGINE": "torch", **MAX_LENGTH}
    if inside:
        target["DRAFTS"] = drafter.get("METHOD", "model")
    nodes = 16 if name == "tree" else None
    # All prompts where drafts are cheap, and by a tree; else a fifth of them.
    own = wanted if name in ("lookup", "tree") and not inside else wanted[::5]
    with trio(
        tmp_path, drafter=drafter, target=target, orchestrator=PATIENT, inside=inside
    ) as services:
        for gamma in (0, 4, 16) if name == "lookup" else (4, 16):
            assert not differing(own, texts(services, own, gamma, nodes)), gamma


def test_greedy_texts_by_openvino_leave_at_near_ties_alone(
    checkpoint: Path,
    wanted: list[Reference],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    target = {"MODEL": str(checkpoint), "ENGINE": "openvino", **MAX_LENGTH}
    with trio(
        tmp_path, drafter={"METHOD": "lookup", "MODEL": ""}, target=target, orchestrator=PATIENT
    ) as services:
        for gamma in (0, 4, 16):
            found = texts(services, wanted, gamma)
            assert not differing(wanted, found)
            both = zip(wanted, found, strict=True)
            ties = sum(reference.near_tie(text) for reference, text in both)
            record_property(f"near ties, gamma {gamma}", ties)
    assert computed_by("openvino", "float32", tmp_path)


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_a_prompt_of_8000_tokens(engine: str, checkpoint: Path, tmp_path: Path) -> None:
    """With the settings' own MAX_LENGTH: a sequence may be as long as the model can hold."""
    sources = sorted(Path(asyncio.__file__).parent.glob("*.py"))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    whole = tokenizer("\n".join(path.read_text() for path in sources)).input_ids
    wanted = references([tokenizer.decode(whole[:8000])], TOKENS, checkpoint)
    assert abs(len(wanted[0].prompt) - 8000) < 10
    target = {"MODEL": str(checkpoint), "ENGINE": engine, "THREADS": "2"}
    with trio(
        tmp_path, drafter={"METHOD": "lookup", "MODEL": ""}, target=target, orchestrator=PATIENT
    ) as services:
        for gamma in (0, 4):
            assert not differing(wanted, texts(services, wanted, gamma))


@torch.inference_mode()
def gaps_of(model: PreTrainedModel, prompt: list[int], text: list[int]) -> tuple[float, float]:
    """The most by which a chosen token's logit is below the largest one, and the model's own noise:
    the largest difference between two kinds of attention."""
    tokens = torch.tensor([[*prompt, *text]])
    rows = []
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        rows.append(model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1].float())
    chosen = rows[0].gather(1, torch.tensor(text)[:, None])[:, 0]
    return float((rows[0].amax(1) - chosen).max()), float((rows[0] - rows[1]).abs().max())


@pytest.mark.parametrize("engine", ["torch", "openvino"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_each_token_of_a_narrow_dtype_is_within_the_noise_of_a_plain_pass(
    dtype: str, engine: str, checkpoint: Path, wanted: list[Reference], tmp_path: Path
) -> None:
    target = {"MODEL": str(checkpoint), "ENGINE": engine, "DTYPE": dtype, "THREADS": "2"}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    few = wanted[::5]
    with trio(
        tmp_path,
        drafter={"MODEL": str(checkpoint), "DTYPE": dtype, **OWN_LAYERS},
        target=target | MAX_LENGTH,
        orchestrator=PATIENT,
    ) as services:
        for gamma in (0, 4):
            for reference, text in zip(few, texts(services, few, gamma), strict=True):
                gap, noise = gaps_of(model, reference.prompt, text)
                assert gap <= 3 * noise, (gamma, gap, noise)
    # OpenVINO's pass takes no float16.
    assert computed_by("torch" if dtype == "float16" else engine, dtype, tmp_path)


@torch.inference_mode()
def law_of_two_tokens(
    checkpoint: Path, prompt: list[int]
) -> tuple[dict[tuple[int, ...], int], np.ndarray]:
    """Places of the pairs, and their probabilities, at temperature 1 with top-k."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    first = model(torch.tensor([prompt])).logits[0, -1].topk(TOP_K)
    texts = torch.tensor([[*prompt, token] for token in first.indices.tolist()])
    second = model(texts).logits[:, -1].topk(TOP_K)
    law = first.values.softmax(-1)[:, None] * second.values.softmax(-1)
    pairs: dict[tuple[int, ...], int] = {
        (ours, theirs): TOP_K * row + column
        for row, ours in enumerate(first.indices.tolist())
        for column, theirs in enumerate(second.indices[row].tolist())
    }
    return pairs, law.flatten().double().numpy()


@pytest.mark.parametrize("inside", [False, True], ids=["three processes", "inside"])
def test_the_law_of_two_tokens(inside: bool, checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompt = tokenizer("The most important thing about a holiday is").input_ids
    pairs, law = law_of_two_tokens(checkpoint, prompt)
    counts = np.zeros(len(law), dtype=np.int64)
    target = {"MODEL": str(checkpoint), "ENGINE": "torch", "MAX_LENGTH": "256"}
    if inside:
        target["DRAFTS"] = "model"
    drafted = accepted = 0
    with trio(
        tmp_path,
        drafter={"MODEL": str(checkpoint), "MAX_LENGTH": "256", **OWN_LAYERS},
        target=target,
        orchestrator=PATIENT,
        inside=inside,
    ) as services:

        async def all_texts() -> None:
            nonlocal drafted, accepted
            waiting = iter(range(TEXTS))

            async def work(stub: orchestrator_pb2_grpc.OrchestratorServiceAsyncStub) -> None:
                nonlocal drafted, accepted
                for seed in waiting:
                    message = generation(
                        prompt, max_new_tokens=3, seed=seed, gamma=2, temperature=1.0
                    )
                    message.sampling.top_k = TOP_K
                    reply = await stub.Complete(pb.CompleteRequest(generation=message), timeout=300)
                    drafted += reply.summary.drafted_tokens
                    accepted += reply.summary.accepted_tokens
                    counts[pairs[tuple(reply.token_ids[:2])]] += 1

            async with grpc.aio.insecure_channel(services.orchestrator.address) as channel:
                stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
                await asyncio.gather(*(work(stub) for _ in range(8)))

        asyncio.run(all_texts())
    assert chi_square_p_value(counts, law) > SMALLEST_P
    assert accepted > drafted / 4, "nothing was tested"


def test_chats_by_http_are_those_of_transformers(
    checkpoint: Path, wanted: list[Reference], tmp_path: Path
) -> None:
    """By OpenAI's client; and prompts of 10, 500 and 2,000 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    words = tokenizer((Path(__file__).resolve().parents[3] / "LICENSE").read_text()).input_ids
    target = {"MODEL": str(checkpoint), "ENGINE": "torch", **MAX_LENGTH}
    with trio(
        tmp_path,
        drafter={"METHOD": "lookup", "MODEL": "", **MAX_LENGTH},
        target=target,
        orchestrator=PATIENT | {"HTTP_LISTEN": "127.0.0.1:0"},
    ) as services:
        address = services.stack.further_addresses("HTTP_LISTEN")["orchestrator"]
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none")
        name = client.models.list().data[0].id
        for question, reference in zip(QUESTIONS[:5], wanted, strict=False):
            answer = client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                max_tokens=TOKENS,
            )
            expected = tokenizer.decode(reference.tokens, skip_special_tokens=True)
            assert answer.choices[0].message.content == expected
        for count in (10, 500, 2000):
            prompt = torch.tensor([words[:count]])
            mask = torch.ones_like(prompt)
            new = model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)
            completion = client.completions.create(
                model=name, prompt=words[:count], temperature=0, max_tokens=8
            )
            expected = tokenizer.decode(new[0, count:], skip_special_tokens=True)
            assert completion.choices[0].text == expected, count
