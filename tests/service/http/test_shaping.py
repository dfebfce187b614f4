"""Logits that a request shapes, by OpenAI's own client and by gRPC."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import grpc
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.service.http.conftest import IN_ONE_LOOP, Fronts
from tests.support.laws.laws import chi_square_p_value
from tests.support.processes.services import generation

pytestmark = IN_ONE_LOOP

PROMPT = "def main("
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SMALLEST_P = 1e-4


async def complete(fronts: Fronts, **asked: Any) -> Any:
    more: dict[str, Any] = {"model": "target", "prompt": PROMPT, "max_tokens": 24, "seed": 7}
    found = await fronts.openai.completions.create(**(more | asked))
    return found.choices[0]


async def by_grpc(fronts: Fronts, shaping: common_pb2.Shaping, **changes: Any) -> Any:
    message = generation(PROMPT, max_new_tokens=24, seed=7, gamma=4, **changes)
    message.sampling.shaping.CopyFrom(shaping)
    request = pb.CompleteRequest(generation=message)
    return await fronts.services.orchestrator.Complete(request)


async def test_a_text_is_that_of_grpc(fronts: Fronts) -> None:
    shaping = common_pb2.Shaping(
        logit_bias={40: 3.0}, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.2
    )
    wanted = await by_grpc(fronts, shaping)
    found = await complete(
        fronts,
        logit_bias={"40": 3},
        frequency_penalty=0.5,
        presence_penalty=0.25,
        extra_body={"repetition_penalty": 1.2},
    )
    assert found.text == wanted.text
    assert wanted.summary.effective.sampling.shaping == shaping
    assert found.text != (await complete(fronts)).text


async def test_greedy_texts_are_those_of_transformers(
    fronts: Fronts, embedded_pair: tuple[Any, Any]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_pair[1], dtype=torch.float32)
    info = await fronts.services.target.GetModelInfo(pb.GetModelInfoRequest())
    assert info.info.dtype == "float32"  # another one has near ties
    ids = (await fronts.http.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
    for shaping, more in (
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        (
            {"bad_words": ["self", "return"], "min_tokens": 20},
            {
                "bad_words_ids": [
                    (await fronts.http.post("/tokenize", json=body)).json()["tokens"]
                    for word in ("self", " self", "return", " return")
                    for body in [{"prompt": word, "add_special_tokens": False}]
                ],
                "min_new_tokens": 20,
            },
        ),
    ):
        found = await complete(fronts, temperature=0, max_tokens=40, extra_body=shaping)
        expected = model.generate(
            torch.tensor([ids]),
            max_new_tokens=40,
            do_sample=False,
            **more,
        )[0, len(ids) :].tolist()
        told = (await fronts.http.post("/detokenize", json={"tokens": expected})).json()["prompt"]
        assert found.text == told


async def test_json_keeps_to_its_schema(fronts: Fronts) -> None:
    asked: dict[str, Any] = {
        "extra_body": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "found", "schema": SCHEMA, "strict": True},
            }
        },
        "max_tokens": 200,
    }
    for seed in range(2):
        whole = await complete(fronts, seed=seed, **asked)
        assert whole.finish_reason == "stop", seed
        chunks = await fronts.openai.completions.create(
            model="target", prompt=PROMPT, stream=True, seed=seed, **asked
        )
        streamed = "".join([part.text async for chunk in chunks for part in chunk.choices])
        for way, text in (("whole", whole.text), ("streamed", streamed)):
            parsed = json.loads(text)
            assert set(parsed) == {"a", "b"}, (way, seed)
            assert 0 <= parsed["a"] <= 99, (way, seed)


NAMES: list[tuple[Any, set[str] | None]] = [
    ({"guided_choice": ["one", "two"]}, {"one", "two"}),
    ({"structured_outputs": {"choice": ["one", "two"]}}, {"one", "two"}),
    ({"guided_regex": "x(1|2)"}, {"x1", "x2"}),
    ({"guided_grammar": 'start: "a" ("b" | "c")'}, {"ab", "ac"}),
    ({"response_format": {"type": "text"}}, None),
]


async def test_all_names_of_grammars_are_known(fronts: Fronts) -> None:
    for asked, texts in NAMES:
        found = [await complete(fronts, seed=seed, extra_body=asked) for seed in range(3)]
        assert texts is None or {each.text for each in found} <= texts, asked
        assert texts is None or {each.finish_reason for each in found} == {"stop"}, asked


async def test_a_grammar_leaves_the_law_of_what_it_allows(fronts: Fronts) -> None:
    """Chi-square of choices, with drafts and without, by both fronts."""
    choices = ["self", "x", "None", "0"]
    counts = []
    for gamma in (0, 4):
        found: Counter[str] = Counter()
        for seed in range(0, 96, 32):
            reply = await fronts.openai.completions.create(
                model="target",
                prompt=PROMPT,
                n=32,
                seed=seed,
                max_tokens=16,
                extra_body={"guided_choice": choices, "tandem": {"gamma": gamma}},
            )
            found.update(choice.text for choice in reply.choices)
        counts.append(np.array([found[choice] for choice in choices]))
    plain, drafted = counts
    assert plain.sum() == drafted.sum() == 96
    assert chi_square_p_value(drafted, plain / plain.sum()) > SMALLEST_P


async def test_a_text_ends_where_nothing_may_come(fronts: Fronts) -> None:
    info = (await fronts.services.target.GetModelInfo(pb.GetModelInfoRequest())).info
    shaping = common_pb2.Shaping(regex="ab", min_tokens=20)
    wanted = await by_grpc(fronts, shaping)
    assert wanted.summary.finish_reason == pb.FINISH_REASON_DEAD_END
    assert wanted.text == "ab"
    assert info.eos_token_ids
    found = await complete(fronts, extra_body={"guided_regex": "ab", "min_tokens": 20})
    assert (found.text, found.finish_reason, found.stop_reason) == ("ab", "stop", "dead_end")
    # At once: not even a first token.
    words = [common_pb2.Shaping.Word(token_ids=[i]) for i in range(256)]
    none = await by_grpc(fronts, common_pb2.Shaping(regex="\\x01", bad_words=words))
    assert none.summary.finish_reason == pb.FINISH_REASON_DEAD_END
    assert not none.token_ids


async def test_a_dead_end_loses_no_text_and_fails_nothing(fronts: Fronts) -> None:
    asked: dict[str, Any] = {"guided_regex": "ab", "min_tokens": 20}
    for gamma in (0, 4):
        more: dict[str, Any] = {"stop": "abX", "logprobs": 1}
        own = {"gamma": gamma, "processed_logprobs": True}
        found = await complete(fronts, **more, extra_body={**asked, "tandem": own})
        assert (found.text, found.stop_reason) == ("ab", "dead_end")
        chunks = await fronts.openai.completions.create(
            model="target",
            prompt=PROMPT,
            max_tokens=24,
            stream=True,
            **more,
            extra_body={**asked, "tandem": own},
        )
        assert "".join([part.text async for chunk in chunks for part in chunk.choices]) == "ab"
    message = generation(PROMPT, max_new_tokens=24, seed=7, gamma=0)
    message.sampling.shaping.CopyFrom(common_pb2.Shaping(regex="ab", min_tokens=20))
    message.stopping.stop_strings.append("abX")
    request = pb.CompleteRequest(generation=message)
    assert (await fronts.services.orchestrator.Complete(request)).text == "ab"


async def test_stop_strings_wait_for_min_tokens(fronts: Fronts) -> None:
    plain = await complete(fronts, temperature=0)
    stop = plain.text[2:4]
    early = await complete(fronts, temperature=0, stop=stop)
    assert early.text == plain.text[: plain.text.index(stop)]
    late = await complete(fronts, temperature=0, stop=stop, extra_body={"min_tokens": 12})
    assert late.text.startswith(plain.text[: plain.text.index(stop) + len(stop)])


WRONG: list[tuple[Any, str]] = [
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"min_tokens": 25}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x"] * 65}, "bad_words"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "no"}},
            }
        },
        "response_format",
    ),
    ({"guided_regex": "a(b"}, "guided_regex"),
    ({"guided_json": {"type": "nothing"}}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs.regex"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a" * 70_000}, "guided_regex"),
]


async def test_what_is_wrong_is_named(fronts: Fronts) -> None:
    for asked, param in WRONG:
        with pytest.raises(openai.BadRequestError) as refused:
            await complete(fronts, extra_body=asked)
        assert refused.value.param == param, asked
        message = refused.value.body["message"]  # type: ignore[index]
        assert message.startswith(param), (asked, message)
    # Nothing was opened for them.
    info = await fronts.services.orchestrator.GetModelInfo(pb.GetModelInfoRequest())
    assert info.active_requests == 0


async def test_what_is_ours_is_not_the_clients(fronts: Fronts) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await by_grpc(fronts, common_pb2.Shaping(end_token_ids=[1]))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "end_token_ids must be left out" in str(refused.value.details())
