"""Chats as prompts: the checkpoint's own template, rendered as transformers renders it, within
bounds."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import FrameType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.errors import InvalidRequest, StartupError, first_line

# Lines of the template that a chat may take; 1,000 messages with tools take some 50,000.
_MOST_LINES = 500_000
# Characters of a product of strings.
_MOST_PRODUCT = 1 << 20


class _TooLong(Exception):
    """A bound is reached."""


class _Generation(Extension):
    """`{% generation %}`, which marks what a model wrote; a prompt has it as it is."""

    tags = {"generation"}  # noqa: RUF012  # as the library has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements within."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """See jinja2; what would fill the memory is refused."""
        if operator == "%" and isinstance(left, str):
            raise TemplateError("text is not formatted by %")
        sizes = [len(side) for side in (left, right) if hasattr(side, "__len__")]
        numbers = [side for side in (left, right) if isinstance(side, int)]
        if sizes and numbers and sizes[0] * numbers[0] > _MOST_PRODUCT:
            raise _TooLong
        if len(numbers) == 2:
            first, second = (number.bit_length() for number in numbers)
            if (first * abs(right) if operator == "**" else first + second) > _MOST_PRODUCT:
                raise _TooLong
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """Renders chats. A template is trusted as its checkpoint is: bounds are there against mistakes.

    Args:
        source: the template, Jinja.
        special_tokens: texts of tokens by the names that the template has for them.
        most: characters of a prompt.

    Raises:
        StartupError: it is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], most: int) -> None:
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["dict"] = lambda *pairs, **items: dict(*pairs, **items)
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens, self._most = dict(special_tokens), most
        try:
            self._compiled = environment.from_string(source)
        except TemplateError as error:
            raise StartupError(f"no chat template: {first_line(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = True,
        more: Mapping[str, Any] = {},
    ) -> str:
        """The prompt of a chat. Takes milliseconds, of a long chat a second.

        Args:
            messages: of the chat.
            tools: that the model may call, as OpenAI's API describes them.
            generation_prompt: whether the prompt ends where the model's answer begins.
            more: what else the template reads.

        Raises:
            InvalidRequest: the template refuses the chat, fails, or takes too long.
        """
        lines = 0

        def count(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal lines
            lines += 1
            if lines > _MOST_LINES:
                raise _TooLong
            return count

        given = {
            **more,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": generation_prompt,
        }
        parts, size = [], 0
        # A loop of the template is a loop of Python, which nothing else could end.
        before = sys.gettrace()
        try:
            sys.settrace(count)
            for part in self._compiled.generate({**self._special_tokens, **given}):
                size += len(part)
                if size > self._most:
                    raise _TooLong
                parts.append(part)
        except _TooLong:
            raise InvalidRequest("chat: the chat is too long for its template") from None
        except TemplateError as error:
            raise InvalidRequest(f"chat: the template says: {first_line(error)}") from None
        except Exception as error:  # whatever a template does with what it was given
            raise InvalidRequest(
                f"chat: the template fails: {type(error).__name__}: {first_line(error)}"
            ) from None
        finally:
            sys.settrace(before)
        return "".join(parts)


def _refuse(sentence: str) -> None:
    raise TemplateError(sentence)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape what HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
