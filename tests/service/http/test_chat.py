"""/v1/chat/completions: the target's template, streams, tools."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from itertools import cycle
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from orchestrator.text.stop_strings import TextStream
from tests.service.http.conftest import IN_ONE_LOOP, Fronts, serving_http
from tests.support.models.chat_templates import TEMPLATES, TOOLS

pytestmark = IN_ONE_LOOP

CHAT: list[Any] = [
    {"role": "system", "content": "# Python"},
    {"role": "user", "content": "def main("},
]


@pytest.fixture(scope="module")
def chatting(
    embedded_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The embedded pair, whose target has Qwen's template."""
    target = tmp_path_factory.mktemp("chat") / "chat"
    shutil.copytree(embedded_pair[1], target)
    (target / "chat_template.jinja").write_text(TEMPLATES["qwen-2.5"])
    return embedded_pair[0], target


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chats(chatting: tuple[Path, Path]) -> AsyncIterator[Fronts]:
    async with serving_http(chatting) as fronts:
        yield fronts


async def test_a_chat_is_its_templates_prompt(chats: Fronts, chatting: tuple[Path, Path]) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(chatting[1])
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    asked: dict[str, Any] = {"model": "chat", "seed": 3, "temperature": 0.7}
    wanted = await chats.openai.completions.create(prompt=prompt, max_tokens=20, **asked)
    found = await chats.openai.chat.completions.create(
        messages=CHAT, max_completion_tokens=20, **asked
    )
    assert found.choices[0].message.content == wanted.choices[0].text
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert wanted.usage is not None
    assert found.usage.prompt_tokens == wanted.usage.prompt_tokens
    parts, roles, ends = [], [], []
    async for chunk in await chats.openai.chat.completions.create(
        messages=CHAT, max_tokens=20, stream=True, n=1, **asked
    ):
        (choice,) = chunk.choices
        parts.append(choice.delta.content or "")
        roles += [choice.delta.role] if choice.delta.role else []
        ends += [choice.finish_reason] if choice.finish_reason else []
    assert "".join(parts) == wanted.choices[0].text
    assert (roles, ends) == (["assistant"], ["length"])


async def test_a_chat_has_log_probabilities(chats: Fronts) -> None:
    asked: dict[str, Any] = {"model": "chat", "messages": CHAT, "max_tokens": 12, "seed": 3}
    asked |= {"logprobs": True, "top_logprobs": 2}
    found = (await chats.openai.chat.completions.create(**asked)).choices[0]
    assert found.logprobs is not None
    assert found.logprobs.content
    assert "".join(one.token for one in found.logprobs.content) == found.message.content
    for one in found.logprobs.content:
        assert one.logprob <= one.top_logprobs[0].logprob <= 0
        assert len(one.top_logprobs) == 2
        assert one.bytes is not None
        assert bytes(one.bytes).decode(errors="replace") == one.token
    parts: list[Any] = []
    async for chunk in await chats.openai.chat.completions.create(stream=True, **asked):
        told = chunk.choices[0].logprobs
        parts += told.content or [] if told is not None else []
    assert [one.logprob for one in parts] == [one.logprob for one in found.logprobs.content]
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        await chats.openai.chat.completions.create(**{**asked, "logprobs": False})


async def test_a_target_without_a_template_says_what_to_set(fronts: Fronts) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template; save one") as refused:
        await fronts.openai.chat.completions.create(model="target", messages=CHAT)
    assert refused.value.param == "messages"


async def test_what_a_model_writes_may_be_a_call(
    chats: Fronts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of the tokens is that of a call, in parts."""
    written = ["<tool_", "call>", '{"name": "weather", ', '"arguments": {}}', "</tool_call>"]
    parts = cycle(written)
    monkeypatch.setattr(TextStream, "push", lambda *of, **more: next(parts))
    monkeypatch.setattr(TextStream, "flush", lambda *of: "")
    asked: dict[str, Any] = {"model": "chat", "messages": CHAT, "max_tokens": 5}
    asked |= {"tools": TOOLS, "extra_body": {"ignore_eos": True}}
    found = await chats.openai.chat.completions.create(**asked)
    message = found.choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", "{}")
    names = []
    async for chunk in await chats.openai.chat.completions.create(**asked, stream=True):
        for told in chunk.choices[0].delta.tool_calls or ():
            assert told.function is not None
            names.append((told.index, told.function.name))
        assert not chunk.choices[0].delta.content
    assert names == [(0, "weather")]
    plain = await chats.openai.chat.completions.create(**{**asked, "tool_choice": "none"})
    assert plain.choices[0].message.content == "".join(written)


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
    ),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"tool_choice": "required", "tools": TOOLS}, "tool_choice"),
    ({"tools": [1]}, "tools.0"),
    ({"messages": [{"role": "a"}] * 4097}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages.0.tool_calls"),
    ({"logprobs": 1}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
]


async def test_a_field_that_is_out_of_range_is_named(chats: Fronts) -> None:
    for fields, named in MALFORMED:
        body = {"messages": CHAT, **fields}
        reply = await chats.http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400, (fields, reply.text)
        error = reply.json()["error"]
        assert error["param"] is not None
        assert error["param"].startswith(named), (fields, error)
    assert await chats.services.open_sequences() == 0
