"""What a text has to look like, as OpenAI's API and vLLM's say it, as one grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.front.http.bodies.fields import Exact
from tandem.errors import InvalidRequest
from tandem.speculation.request.shaping import Grammar, GrammarKind

_MOST_CHOICES = 1024
_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')

Schema = dict[str, Any] | str
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=_MOST_CHOICES)
]


class JsonSchema(Exact):
    """Of a response format.

    Attributes:
        given: the schema.
        name: for the caller; without an effect here, as the next two.
        description: see `name`.
        strict: see `name`: the text always keeps to the schema.
    """

    given: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Exact):
    """OpenAI's.

    Attributes:
        type: text, any JSON object, or JSON by a schema.
        json_schema: of the last.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def grammar(self) -> Grammar | None:
        """None for any text.

        Raises:
            InvalidRequest: the schema is missing, or has no use.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest("response_format.json_schema goes with the type json_schema")
        if self.json_schema is not None:
            return _of_schema(self.json_schema.given)
        return _OBJECT if self.type == "json_object" else None


class StructuredOutputs(Exact):
    """vLLM's; exactly one is given.

    Attributes:
        by_json: a JSON schema.
        regex: a regular expression.
        choice: texts, one of which comes.
        grammar: in llguidance's variant of Lark.
    """

    by_json: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


def grammars_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    guided: StructuredOutputs,
) -> dict[str, Grammar]:
    """The grammars that a body asks for, by the fields that do.

    Args:
        response_format: of the body.
        structured: the body's structured_outputs.
        guided: its fields of older names.

    Raises:
        InvalidRequest: a format has no schema, or one without a use.
    """
    found = {f"guided_{name}": grammar for name, grammar in _grammars_of(guided)}
    if structured is not None:
        found |= {f"structured_outputs.{name}": each for name, each in _grammars_of(structured)}
    if response_format is not None and response_format.grammar is not None:
        found["response_format"] = response_format.grammar
    return found


def _grammars_of(asked: StructuredOutputs) -> Iterator[tuple[str, Grammar]]:
    if asked.by_json is not None:
        yield "json", _of_schema(asked.by_json)
    if asked.regex is not None:
        yield "regex", Grammar(GrammarKind.REGEX, asked.regex)
    if asked.choice is not None:
        # A string of Lark is one of JSON.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.choice)
        yield "choice", Grammar(GrammarKind.LARK, f"start: {texts}")
    if asked.grammar is not None:
        yield "grammar", Grammar(GrammarKind.LARK, asked.grammar)


def _of_schema(schema: Schema) -> Grammar:
    written = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Grammar(GrammarKind.JSON_SCHEMA, written)
