"""Log probabilities, by OpenAI's own client and by gRPC, beside transformers'."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.speculation.distribution import process
from tandem.speculation.request.sampling import Sampling
from tests.service.http.conftest import IN_ONE_LOOP, Fronts
from tests.support.processes.services import generation

pytestmark = IN_ONE_LOOP

PROMPT = "def main("
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def model(embedded_pair: tuple[Path, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(embedded_pair[1], dtype=torch.float32)


def logits_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[T, V] logits, row i after token i."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


async def by_grpc(
    fronts: Fronts, *, shaping: Any = None, gamma: int = 4, **spec: Any
) -> pb.CompleteResponse:
    message = generation(PROMPT, max_new_tokens=32, seed=7, gamma=gamma)
    message.sampling.temperature, message.sampling.top_k = 0.8, 20
    if shaping is not None:
        message.sampling.shaping.CopyFrom(shaping)
    message.log_probs.CopyFrom(common_pb2.LogProbsSpec(**spec))
    reply: pb.CompleteResponse = await fronts.services.orchestrator.Complete(
        pb.CompleteRequest(generation=message)
    )
    return reply


@pytest.mark.parametrize("gamma", [0, 4])
async def test_they_are_the_models_own(fronts: Fronts, model: Any, gamma: int) -> None:
    reply = await by_grpc(fronts, gamma=gamma, top=3, prompt=True)
    prompt = [told.id for told in reply.prompt_log_probs]
    assert not reply.prompt_log_probs[0].HasField("value")
    laws = logits_of(model, [*prompt, *reply.token_ids]).log_softmax(-1)
    told = [*reply.prompt_log_probs, *reply.log_probs][1:]
    ids = [*prompt, *reply.token_ids][1:]
    assert len(told) == len(ids)
    assert reply.summary.accepted_tokens > 8 or not gamma, "of accepted tokens too"
    for law, one, token in zip(laws, told, ids, strict=False):
        assert one.id == token
        assert one.value == pytest.approx(float(law[token]), abs=TOLERANCE)
        values = law.topk(3).values.tolist()
        assert [top.value for top in one.top] == pytest.approx(values, abs=TOLERANCE)
        assert [float(law[top.id]) for top in one.top] == pytest.approx(values, abs=TOLERANCE)


async def test_they_do_not_change_the_text(fronts: Fronts) -> None:
    message = generation(PROMPT, max_new_tokens=32, seed=7, gamma=4)
    message.sampling.temperature, message.sampling.top_k = 0.8, 20
    plain = await fronts.services.orchestrator.Complete(pb.CompleteRequest(generation=message))
    assert not plain.log_probs
    assert not plain.prompt_log_probs
    for spec in ({"top": 2}, {"processed": True}, {"prompt": True}):
        reply = await by_grpc(fronts, **spec)
        assert list(reply.token_ids) == list(plain.token_ids)
        assert len(reply.log_probs) == len(reply.token_ids)


async def test_those_of_what_is_drawn_from_are_asked_for_apart(fronts: Fronts, model: Any) -> None:
    shaping = common_pb2.Shaping(logit_bias={40: 2.0}, frequency_penalty=1.5)
    reply = await by_grpc(fronts, shaping=shaping, top=2, processed=True)
    body = {"prompt": PROMPT}
    prompt = (await fronts.http.post("/tokenize", json=body)).json()["tokens"]
    logits = logits_of(model, [*prompt, *reply.token_ids])[len(prompt) - 1 : -1].clone()
    for row, _ in enumerate(reply.token_ids):
        logits[row, 40] += 2.0
        for token in reply.token_ids[:row]:
            logits[row, token] -= 1.5
    laws = process(logits, [Sampling(temperature=0.8, top_k=20)]).log()
    for law, one, token in zip(laws, reply.log_probs, reply.token_ids, strict=True):
        assert one.value == pytest.approx(float(law[token]), abs=5e-3)
        assert [top.value for top in one.top] == pytest.approx(
            law.topk(2).values.tolist(), abs=5e-3
        )


async def test_completions_have_them_as_openai_says(fronts: Fronts) -> None:
    asked: dict[str, Any] = {"model": "target", "max_tokens": 16, "seed": 3, "logprobs": 2}
    found = (await fronts.openai.completions.create(prompt=PROMPT, **asked)).choices[0]
    assert found.logprobs is not None
    told = found.logprobs
    assert "".join(told.tokens or ()) == found.text
    assert told.text_offset is not None
    assert told.tokens
    assert told.text_offset[:2] == [0, len(told.tokens[0])]
    for token, value, top in zip(
        told.tokens or (), told.token_logprobs or (), told.top_logprobs or (), strict=True
    ):
        assert top[token] == value <= 0
        assert 2 <= len(top) <= 3
    # In parts, the same.
    parts = []
    stream = await fronts.openai.completions.create(prompt=PROMPT, stream=True, **asked)
    async for chunk in stream:
        parts += [choice.logprobs for choice in chunk.choices if choice.logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in getattr(part, name)] == getattr(told, name)


async def test_echo_tells_those_of_the_prompt(fronts: Fronts, model: Any) -> None:
    ids = (await fronts.http.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
    for prompt in (PROMPT, ids):
        found = await fronts.openai.completions.create(
            model="target", prompt=prompt, max_tokens=1, echo=True, logprobs=1, temperature=0
        )
        told = found.choices[0].logprobs
        assert told is not None
        assert told.token_logprobs is not None
        assert told.token_logprobs[0] is None
        assert len(told.token_logprobs) == len(ids) + 1
        laws = logits_of(model, ids).log_softmax(-1)
        expected = [float(law[token]) for law, token in zip(laws, ids[1:], strict=False)]
        assert told.token_logprobs[1:-1] == pytest.approx(expected, abs=TOLERANCE)


async def test_offsets_are_places_in_the_text(fronts: Fronts) -> None:
    """Also where characters have several tokens, and never after a stop string."""
    prompt = "# 🎉🔥 日本語\nx = "
    asked: dict[str, Any] = {"model": "target", "echo": True, "logprobs": 0, "temperature": 0}
    plain = (await fronts.openai.completions.create(prompt=PROMPT, max_tokens=24, **asked)).choices
    stop = plain[0].text[len(PROMPT) + 9 :][:2]
    ids = (await fronts.http.post("/tokenize", json={"prompt": prompt})).json()["tokens"]
    for more in (
        {"prompt": prompt, "max_tokens": 3},
        {"prompt": ids, "max_tokens": 3},
        {"prompt": PROMPT, "max_tokens": 24, "stop": stop},
        {"prompt": PROMPT, "max_tokens": 24, "stop": stop, "stream": True},
    ):
        found = await fronts.openai.completions.create(**asked, **more)
        choices = (
            [choice async for chunk in found for choice in chunk.choices]
            if "stream" in more
            else found.choices
        )
        text = "".join(choice.text for choice in choices)
        told = [choice.logprobs for choice in choices if choice.logprobs is not None]
        tokens = [token for one in told for token in one.tokens]
        offsets = [offset for one in told for offset in one.text_offset]
        assert len(offsets) > 6
        for token, offset in zip(tokens, offsets, strict=True):
            if token.startswith("bytes:"):
                assert ord(text[offset]) > 127
            else:
                rest = text[offset : offset + len(token)]
                assert rest == token[: len(rest)] != "", (token, offset)
        assert offsets == sorted(offsets)


@pytest.mark.parametrize(
    ("asked", "param"),
    [({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"logprobs": 1.5}, None)],
)
async def test_what_is_wrong_is_named(fronts: Fronts, asked: Any, param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await fronts.openai.completions.create(
            model="target", prompt=PROMPT, extra_body=asked, max_tokens=2
        )
    assert refused.value.param in (param, "logprobs")


async def test_grpc_names_it_too(fronts: Fronts) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"log_probs.top must be 0..20, got 21"):
        await by_grpc(fronts, top=21)


async def test_an_impossible_top_token_is_a_number(fronts: Fronts) -> None:
    found = await fronts.openai.completions.create(
        model="target",
        prompt=PROMPT,
        max_tokens=4,
        temperature=0,
        logprobs=3,
        extra_body={"tandem": {"processed_logprobs": True}},
    )
    told = found.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs == [0.0] * 4
    assert all(math.isfinite(v) for top in told.top_logprobs or () for v in top.values())
