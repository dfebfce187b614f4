"""Mutated bodies of HTTP calls, given to the orchestrator's code that reads them."""

from __future__ import annotations

import json
import random
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from orchestrator.front.chat_template import ChatTemplate
from orchestrator.front.http import errors
from orchestrator.front.http.bodies import reading
from orchestrator.front.http.bodies.chat import ChatBody
from orchestrator.front.http.bodies.completion import CompletionBody
from orchestrator.front.http.bodies.fields import Body
from orchestrator.front.http.tools import names_of
from tandem.errors import InvalidRequest
from tandem.peers.text.values import Request
from tests.fuzz.mutation import mutant_json
from tests.fuzz.read.surface import Surface, Violation
from tests.support.models.chat_templates import CHATS, SPECIAL_TOKENS, TEMPLATES, TOOLS

_SAMPLING: dict[str, Any] = {
    "model": "target",
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 9,
    "stop": ["x", "y"],
    "stop_token_ids": [1, 2],
    "include_stop_str_in_output": False,
    "ignore_eos": True,
    "presence_penalty": 0,
    "logit_bias": {},
    "user": "ann",
    "tandem": {"verifier": "block", "gamma": 4, "max_nodes": 6, "tokens": True},
}
_TEMPLATE = ChatTemplate(TEMPLATES["qwen-2.5"], SPECIAL_TOKENS, 1 << 16)


_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_FORMATS: tuple[Mapping[str, Any], ...] = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}},
    {"structured_outputs": {"choice": ["a", "b"]}, "bad_words": ["x", "y"], "min_tokens": 2},
    {"guided_json": _SCHEMA, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"guided_regex": "a|b", "logit_bias": {"3": 1.5, "7": -100}},
    {"guided_choice": ["a"]},
    {"guided_grammar": "start: /a+/"},
)


class _Bodies(Surface):
    """A body is refused with a field and a sentence, or makes requests."""

    kind: ClassVar[type[Body]]
    bodies: ClassVar[tuple[Mapping[str, Any], ...]]

    def draw(self, source: random.Random) -> bytes:
        return mutant_json(source, self.bodies)

    async def check(self, data: bytes) -> str:
        self.sentence = ""
        try:
            for request in self.requests(reading.read(self.kind, data)):
                assert request.sampling.seed >= 0
                assert request.prompt is not None or request.prompt_ids
        except InvalidRequest as error:
            told = errors.body_of(error)["error"]
            self.sentence = str(told["message"])
            if not self.sentence or json.loads(json.dumps(told)) != told:
                raise Violation(data, f"nothing is told: {told}") from error
            return "INVALID_ARGUMENT"
        except Exception as error:
            raise Violation(data, f"{type(error).__name__}: {error}") from error
        return "OK"

    @abstractmethod
    def requests(self, body: Any) -> list[Request]:
        """What comes of a body; may raise anything."""


class Completions(_Bodies):
    """Of /v1/completions."""

    name = "completions"
    share = 0.03
    kind = CompletionBody
    bodies = tuple(
        {**_SAMPLING, "prompt": prompt, "echo": True}
        for prompt in ("def", ["a", "b"], [1, 2], [[1], [2, 3]])
    ) + tuple({"prompt": "def", **each} for each in _FORMATS)

    def requests(self, body: CompletionBody) -> list[Request]:
        return [body.request(prompt, i, "id") for i, prompt in enumerate(body.prompts)]


class Chats(_Bodies):
    """Of /v1/chat/completions, rendered too."""

    name = "chats"
    share = 0.03
    kind = ChatBody
    bodies = tuple(
        {**_SAMPLING, "messages": chat, "tools": TOOLS, "chat_template_kwargs": {"a": 1}}
        for chat in CHATS
    )

    def requests(self, body: ChatBody) -> list[Request]:
        fields = [message.fields(i) for i, message in enumerate(body.messages)]
        tools = body.offered
        names_of(tools)
        prompt = _TEMPLATE.render(
            fields,
            tools,
            generation_prompt=body.add_generation_prompt,
            more=body.chat_template_kwargs or {},
        )
        return [body.request(prompt or " ", 0, "id", special=False)]
