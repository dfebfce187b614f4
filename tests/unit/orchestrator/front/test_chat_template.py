"""Chats are rendered as transformers renders them, and a template has bounds."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from orchestrator.front.chat_template import ChatTemplate
from orchestrator.front.http.bodies.chat import ChatMessage
from tandem.errors import InvalidRequest, StartupError
from tests.support.models.chat_templates import CHATS, SPECIAL_TOKENS, TEMPLATES, TOOLS

MOST = 100_000


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>")), **SPECIAL_TOKENS
    )


def test_there_are_enough_families() -> None:
    assert len(TEMPLATES) >= 12


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("chat", range(len(CHATS)))
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_prompts_are_those_of_transformers(
    family: str, chat: int, tools: Any, prompt: bool, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Or both refuse."""
    own = ChatTemplate(TEMPLATES[family], SPECIAL_TOKENS, MOST)
    messages = copy.deepcopy(CHATS[chat])
    fields = [ChatMessage.model_validate(one).fields(i) for i, one in enumerate(messages)]
    more = {"enable_thinking": False, "controls": {"length": "long"}}
    try:
        wanted = tokenizer.apply_chat_template(
            copy.deepcopy(CHATS[chat]),
            tools=tools,
            chat_template=TEMPLATES[family],
            add_generation_prompt=prompt,
            tokenize=False,
            **more,
        )
    except Exception as error:  # of any kind
        wanted, why = None, str(error).split("\n")[0]
    if wanted is not None:
        assert own.render(fields, tools, generation_prompt=prompt, more=more) == wanted
        return
    with pytest.raises(InvalidRequest, match=re.escape(why)):
        own.render(fields, tools, generation_prompt=prompt, more=more)


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ raise_exception('roles must alternate') }}", "says: roles must alternate"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "long",
        ),
        ("{{ 'x' * 1000000000 }}", "too long"),
        ("{{ 9 ** 9999999 }}", "too long"),
        ("{% for a in range(99999) %}{{ 'long text' }}{% endfor %}", "too long"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: RecursionError"),
        ("{{ messages.__class__.__mro__ }}", "says: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "says: access to attribute 'append'"),
        ("{{ messages[0]['content'] + 1 }}", "fails: TypeError"),
        ("{{ 'x%999999999d' % 5 }}", "says: text is not formatted by %"),
        ("{{ (9 ** 99999) * (9 ** 999999) }}", "too long"),
        ("{{ nothing.at.all }}", "says: 'nothing' is undefined"),
    ],
)
def test_a_template_that_raises_or_does_not_end_is_a_refusal(template: str, sentence: str) -> None:
    own = ChatTemplate(template, {}, MOST)
    with pytest.raises(InvalidRequest, match=r"^chat: ") as refused:
        own.render(CHATS[0])
    assert sentence in str(refused.value)


def test_what_is_no_template_is_told_at_the_start() -> None:
    with pytest.raises(StartupError, match="no chat template: "):
        ChatTemplate("{% for %}", {}, MOST)


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = ChatMessage.model_validate({"role": "user", "content": parts, "name": "ann"})
    assert message.fields(0) == {"role": "user", "content": "a\nb", "name": "ann"}
    picture = ChatMessage.model_validate(
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    )
    with pytest.raises(InvalidRequest, match=r"^messages\.3\.content: only parts"):
        picture.fields(3)


def test_arguments_of_calls_are_objects_for_a_template() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    assert message.fields(0)["tool_calls"][0]["function"]["arguments"] == {"a": 1}
