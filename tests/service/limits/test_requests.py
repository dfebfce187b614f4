"""Each limit of a request: its most is taken, and one more is refused by name, on both fronts.

The fields come from the messages and the bodies themselves: one without a row here fails.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from pydantic import BaseModel

from orchestrator.front.http.bodies.chat import ChatBody, ChatMessage
from orchestrator.front.http.bodies.completion import CompletionBody
from orchestrator.front.http.bodies.formats import JsonSchema, ResponseFormat, StructuredOutputs
from orchestrator.front.http.bodies.generating import Generating, Speculation, StreamOptions
from orchestrator.front.http.bodies.tokens import DetokenizeBody, TokenizeBody
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.service.http.conftest import IN_ONE_LOOP, Fronts, serving_http
from tests.support.waiting import HANG_SECONDS
from tests.support.wire.fields import bounded_fields

pytestmark = IN_ONE_LOOP

LENGTH, GAMMA, TEXTS = 2048, 16, 64  # of a sequence, of a draft, of an HTTP call
GRAMMAR = 65536  # characters
WORD = " import" * 32 + "x" * 32  # 256 characters, of which many make a token
# Ends with its first token, however many it may have.
END = 7
SHAPED = {"sampling": {"shaping": {"logit_bias": {END: 100.0}}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fronts(
    embedded_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fronts]:
    """The embedded pair, whose target has a template that makes the same of any chat."""
    target = tmp_path_factory.mktemp("limits") / "target"
    shutil.copytree(embedded_pair[1], target)
    (target / "chat_template.jinja").write_text("x")
    async with serving_http((embedded_pair[0], target)) as fronts:
        yield fronts


def sampled(**shaping: Any) -> dict[str, Any]:
    return {"sampling": {"shaping": shaping}}


def stopping(most: int = 1, **changes: Any) -> dict[str, Any]:
    return {"stopping": {"max_new_tokens": most, **changes}}


def words(*sizes: int) -> dict[str, Any]:
    return sampled(bad_words=[{"token_ids": [at] * size} for at, size in enumerate(sizes)])


def resumed(count: int) -> dict[str, Any]:
    return {"first_round": 5, "received_token_ids": [1] * count, **stopping(3)}


def chat(count: int) -> dict[str, Any]:
    return {"prompt_token_ids": [], "chat": {"messages": [{"role": "user"}] * count}}


# By field: what has its most, and what has one more; None where the field's type takes no more.
OF_GRPC: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "prompt_token_ids": (
        {"prompt_token_ids": [1] * (LENGTH - 1)},
        {"prompt_token_ids": [1] * (LENGTH + 1)},
    ),
    "sampling.top_k": ({"sampling": {"top_k": 2**32 - 1}}, None),
    "sampling.seed": ({"sampling": {"seed": 2**64 - 1}}, None),
    "sampling.shaping.logit_bias": (
        sampled(logit_bias=dict.fromkeys(range(1024), 1.0)),
        sampled(logit_bias=dict.fromkeys(range(1025), 1.0)),
    ),
    "sampling.shaping.min_tokens": (sampled(min_tokens=1), sampled(min_tokens=2)),
    "sampling.shaping.end_token_ids": ({}, sampled(end_token_ids=[1])),
    "sampling.shaping.bad_words": (words(*[1] * 256), words(*[1] * 257)),
    "sampling.shaping.bad_words.token_ids": (words(64), words(65)),
    "stopping.max_new_tokens": (
        SHAPED | stopping(LENGTH - 1, stop_token_ids=[END]),
        SHAPED | stopping(LENGTH, stop_token_ids=[END]),
    ),
    "stopping.stop_token_ids": (
        stopping(stop_token_ids=range(64)),
        stopping(stop_token_ids=range(65)),
    ),
    "stopping.stop_strings": (
        stopping(stop_strings=["x" * 256] * 16),
        stopping(stop_strings=["x"] * 17),
    ),
    "speculation.gamma": (
        {"speculation": {"gamma": GAMMA}},
        {"speculation": {"gamma": GAMMA + 1}},
    ),
    "speculation.max_nodes": ({}, {"speculation": {"gamma": 4, "max_nodes": 1}}),
    "speculation.verifier_options": ({}, {"speculation": {"verifier_options": {"x": 1.0}}}),
    "first_round": ({"first_round": 2**62}, {"first_round": 2**62 + 1}),
    "received_token_ids": (resumed(3), resumed(4)),
    "bad_strings": ({"bad_strings": [WORD] * 64}, {"bad_strings": ["x"] * 65}),
    "log_probs.top": ({"log_probs": {"top": 20}}, {"log_probs": {"top": 21}}),
    "chat.messages": (chat(4096), chat(4097)),
    "cache_salt": ({"cache_salt": "é" * 128}, {"cache_salt": "x" * 129}),
    "prompt_cache_key": ({"prompt_cache_key": "é" * 128}, {"prompt_cache_key": "x" * 129}),
}
# Texts have no bound in a message's type; of these the most is tested all the same.
TEXTS_OF_GRPC = {"cache_salt", "prompt_cache_key"}


def test_each_field_of_a_generation_has_its_limit_here() -> None:
    assert set(bounded_fields(pb.Generation.DESCRIPTOR)) | TEXTS_OF_GRPC == set(OF_GRPC)


async def status_of(fronts: Fronts, changes: dict[str, Any]) -> tuple[grpc.StatusCode, str]:
    base = {"prompt_token_ids": [1], "speculation": {"gamma": 0}, **stopping()}
    request = pb.CompleteRequest(generation=pb.Generation(**(base | changes)))
    try:
        await fronts.services.orchestrator.Complete(request, timeout=HANG_SECONDS)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize("field", OF_GRPC)
async def test_the_most_is_taken_and_one_more_is_refused_by_grpc(
    fronts: Fronts, field: str
) -> None:
    most, beyond = OF_GRPC[field]
    assert await status_of(fronts, most) == (grpc.StatusCode.OK, "")
    if beyond is not None:
        code, sentence = await status_of(fronts, beyond)
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        named = field if field in sentence else field.split(".")[1 if "." in field else 0]
        assert named in sentence, sentence


SHORT = {"logit_bias": {str(END): 100.0}, "stop_token_ids": [END]}
GENERATING: dict[str, tuple[Any, Any]] = {
    "model": ("target", "nobody"),
    "temperature": (1.7e308, -0.1),
    "top_p": (1.0, 1.01),
    "top_k": (2**32 - 1, 2**32),
    "min_p": (1.0, 1.01),
    "seed": (2**64 - 1, 2**64),
    "n": (TEXTS, TEXTS + 1),
    "stream": (True, "yes"),
    "stream_options": ({"include_usage": True}, []),
    "stop": (["x" * 256] * 16, ["x"] * 17),
    "stop_token_ids": ([*range(64)], [*range(65)]),
    "include_stop_str_in_output": (True, 1),
    "ignore_eos": (True, 1),
    "presence_penalty": (2.0, 2.1),
    "frequency_penalty": (2.0, 2.1),
    "repetition_penalty": (100.0, 100.1),
    "logit_bias": (
        {str(token): 1.0 for token in range(1024)},
        {str(token): 1.0 for token in range(1025)},
    ),
    "min_tokens": (1, 2),
    "bad_words": ([WORD] * 64, ["x"] * 65),
    "response_format": ({"type": "text"}, {"type": "x"}),
    "structured_outputs": ({"choice": ["x"]}, {"choice": ["x"], "regex": "x"}),
    "guided_json": ("{}".ljust(GRAMMAR), "{}".ljust(GRAMMAR + 1)),
    "guided_regex": ("x" * 4096, "x" * (GRAMMAR + 1)),
    "guided_choice": (["x"] * 1024, ["x"] * 1025),
    "guided_grammar": ('start: "x"'.ljust(GRAMMAR), 'start: "x"'.ljust(GRAMMAR + 1)),
    "cache_salt": ("é" * 128, "x" * 129),
    "prompt_cache_key": ("é" * 128, "x" * 129),
    "tandem": ({"gamma": GAMMA}, {"gamma": GAMMA + 1}),
}
LIMIT = ({**SHORT, "": LENGTH - 1}, {**SHORT, "": LENGTH})
FORMAT = {"type": "json_schema", "json_schema": {"schema": {}}}
# A value, or the fields that it comes with, where it has the name "".
OF_HTTP: dict[type[BaseModel], dict[str, tuple[Any, Any]]] = {
    CompletionBody: {
        **GENERATING,
        "max_tokens": LIMIT,
        "prompt": ([1] * (LENGTH - 1), [1] * (LENGTH + 1)),
        "echo": (True, 1),
        "logprobs": (20, 21),
    },
    ChatBody: {
        **GENERATING,
        "max_tokens": LIMIT,
        "max_completion_tokens": LIMIT,
        "messages": ([{"role": "user"}] * 4096, [{"role": "user"}] * 4097),
        "logprobs": (True, 1),
        "top_logprobs": ({"": 20, "logprobs": True}, {"": 21, "logprobs": True}),
        "tools": ([{"type": "function"}] * 256, [{"type": "function"}] * 257),
        "tool_choice": ("auto", "required"),
        "parallel_tool_calls": (True, 1),
        "add_generation_prompt": (False, 0),
        "chat_template_kwargs": ({"x": 1}, []),
    },
    ChatMessage: {
        "role": ("x" * 64, "x" * 65),
        "content": ([{"type": "text", "text": "x"}], 1),
    },
    StreamOptions: {"include_usage": (True, 1), "include_obfuscation": (True, 1)},
    Speculation: {
        "verifier": ("block", "x"),
        "gamma": (GAMMA, GAMMA + 1),
        "max_nodes": (None, 1),
        "verifier_options": ({}, {"x": 1.0}),
        "tokens": (True, 1),
        "processed_logprobs": (True, 1),
        "learn": (False, 0),
    },
    ResponseFormat: {"type": ("json_object", "x"), "json_schema": (None, {"schema": {}})},
    JsonSchema: {
        "schema": ({}, []),
        "name": ("x", 1),
        "description": ("x", 1),
        "strict": (True, 1),
    },
    StructuredOutputs: {
        "json": GENERATING["guided_json"],
        "regex": GENERATING["guided_regex"],
        "choice": GENERATING["guided_choice"],
        "grammar": GENERATING["guided_grammar"],
    },
    TokenizeBody: {
        "model": ("target", "nobody"),
        "prompt": ("x" * LENGTH, "x" * 1_000_000),
        "add_special_tokens": (True, 1),
    },
    DetokenizeBody: {"model": ("target", "nobody"), "tokens": ([1] * LENGTH, [1] * (LENGTH + 1))},
}
PATHS = {ChatBody: "/v1/chat/completions", TokenizeBody: "/tokenize", DetokenizeBody: "/detokenize"}
BASES: dict[type[BaseModel], dict[str, Any]] = {
    CompletionBody: {"prompt": [1], "max_tokens": 1, "tandem": {"gamma": 0}},
    ChatBody: {
        "messages": [{"role": "user"}],
        "max_tokens": 1,
        "tandem": {"gamma": 0},
        "tool_choice": "none",
    },
    TokenizeBody: {"prompt": "x"},
    DetokenizeBody: {"tokens": [1]},
}
# Where the smaller ones stand: the body, and what it is there.
INNER: dict[type[BaseModel], tuple[type[BaseModel], Any]] = {
    ChatMessage: (ChatBody, lambda inner: {"messages": [{"role": "user", **inner}]}),
    StreamOptions: (CompletionBody, lambda inner: {"stream": True, "stream_options": inner}),
    Speculation: (CompletionBody, lambda inner: {"tandem": inner}),
    ResponseFormat: (
        CompletionBody,
        lambda inner: {"response_format": {"type": "json_object", **inner}},
    ),
    JsonSchema: (
        CompletionBody,
        lambda inner: {
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}, **inner}}
        },
    ),
    StructuredOutputs: (CompletionBody, lambda inner: {"structured_outputs": inner}),
}


@pytest.mark.parametrize("kind", OF_HTTP)
def test_each_field_of_a_body_has_its_limit_here(kind: type[BaseModel]) -> None:
    names = {field.alias or name for name, field in kind.model_fields.items()}
    assert names == set(OF_HTTP[kind])
    assert issubclass(kind, Generating) or kind in INNER or kind in BASES


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind, rows in OF_HTTP.items() for field in rows]
)
async def test_the_most_is_taken_and_one_more_is_refused_by_http(
    fronts: Fronts, kind: type[BaseModel], field: str
) -> None:
    most, beyond = OF_HTTP[kind][field]
    code, said = await answered(fronts, kind, field, most)
    assert code == 200, said
    code, said = await answered(fronts, kind, field, beyond)
    assert code == (404 if field == "model" else 400), said
    assert field in said, said


async def answered(
    fronts: Fronts, kind: type[BaseModel], field: str, value: Any
) -> tuple[int, str]:
    """The status of a body with a value at a field, and what is said."""
    whole = isinstance(value, dict) and "" in value
    changes = {name or field: each for name, each in value.items()} if whole else {field: value}
    body, place = INNER.get(kind, (kind, lambda inner: inner))
    sent = BASES[body] | place(changes)
    path = PATHS.get(body, "/v1/completions")
    reply = await fronts.http.post(path, json=sent)
    return reply.status_code, reply.text[:300]
