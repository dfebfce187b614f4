"""Calls of tools in what a model writes, in the two commonest formats.

Hermes' (Qwen, NousResearch): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere.
Llama 3's: the whole text is `{"name": ..., "parameters": {...}}`, or several with `;` in between.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BEGIN, _END = "<tool_call>", "</tool_call>"
_LLAMA = "{"


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool.

    Attributes:
        name: of the tool.
        arguments: JSON.
        id: that the tool's answer names.
    """

    name: str
    arguments: str
    id: str

    def body(self, index: int | None = None) -> dict[str, Any]:
        """As OpenAI's API has it; a chunk's has its number."""
        function = {"name": self.name, "arguments": self.arguments}
        body = {"id": self.id, "type": "function", "function": function}
        return body if index is None else {"index": index, **body}


def names_of(tools: Sequence[Mapping[str, Any]] | None) -> frozenset[str]:
    """The names of tools, as OpenAI's API describes them."""
    functions = [tool.get("function") for tool in tools or ()]
    names = [one.get("name") for one in functions if isinstance(one, Mapping)]
    return frozenset(name for name in names if isinstance(name, str))


class ToolReader:
    """Tells text from calls, as the text comes. What may be a call is held until it is known.

    Args:
        names: of the tools that the model may call; without any, all is text.
        most: calls that are told, the first ones; None for all.
    """

    def __init__(self, names: Collection[str] = (), most: int | None = None) -> None:
        self._names, self._left = frozenset(names), most
        self._held = ""
        self._began = False  # something was told that is not blank

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[ToolCall]]:
        """Text, and calls that are whole.

        Args:
            text: that came.
            last: nothing more comes.
        """
        told, calls = self._push(text, last=last)
        if self._left is not None:
            calls = calls[: self._left]
            self._left -= len(calls)
        return told, calls

    def _push(self, text: str, *, last: bool) -> tuple[str, list[ToolCall]]:
        if not self._names:
            return text, []
        self._held += text
        # What is held can be long; only what came may end it.
        inside = self._held.startswith(_BEGIN)
        if inside and not last and _END not in self._held[-len(text) - len(_END) :]:
            return "", []
        start = self._held if inside else self._held.lstrip()
        if not self._began and not last and (not start or start.startswith(_LLAMA)):
            return "", []
        if not self._began and (calls := self._llama_calls(start)):
            return "", calls
        told, found = "", []
        for part, call in self._hermes(last):
            told += part
            found += [call] if call else []
        self._began = self._began or bool(told.strip()) or bool(found)
        # Blanks between calls, and around them, are for the eye.
        return ("" if found and not told.strip() else told), found

    def _hermes(self, last: bool) -> Iterator[tuple[str, ToolCall | None]]:
        while True:
            before, begin, rest = self._held.partition(_BEGIN)
            if not begin:
                cut = len(before) - (0 if last else _overlap(before, _BEGIN))
                told, self._held = before[:cut], before[cut:]
                yield told, None
                return
            call, end = self._call_in(rest, last)
            if call is None and not last:
                self._held = begin + rest
                yield before, None
                return
            if call is None:  # it is none after all
                self._held = rest
                yield before + begin, None
            else:
                self._held = rest[end:]
                yield before, call

    def _call_in(self, text: str, last: bool) -> tuple[ToolCall | None, int]:
        """The call that a text begins with, and where it ends; an end may be in a string of it."""
        end = text.find(_END)
        while end >= 0:
            if call := self._call_of(text[:end], "arguments"):
                return call, end + len(_END)
            end = text.find(_END, end + 1)
        # The mark of the end may be a token that is not shown.
        return (self._call_of(text, "arguments"), len(text)) if last else (None, 0)

    def _llama_calls(self, text: str) -> list[ToolCall]:
        """The calls that a whole text is; none if it is anything else."""
        decoder, at, calls = json.JSONDecoder(), 0, []
        text = text.strip()
        while at < len(text):
            try:
                _, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                return []
            call = self._call_of(text[at:end], "parameters", "arguments")
            if call is None:
                return []
            calls.append(call)
            at = end
            while at < len(text) and text[at] in "; \n\t":
                at += 1
        return calls

    def _call_of(self, text: str, *keys: str) -> ToolCall | None:
        """A call of a tool that the model may call, with arguments under one of the keys."""
        try:
            found = json.loads(text, parse_constant=_no_number)
            name, key = found["name"], next(key for key in keys if key in found)
            arguments = found[key]
            if not isinstance(arguments, str):
                arguments = json.dumps(
                    {} if arguments is None else arguments, ensure_ascii=False, allow_nan=False
                )
            arguments.encode()
            if name not in self._names:
                return None
        except (ValueError, RecursionError, KeyError, TypeError, StopIteration):
            return None
        return ToolCall(name, arguments, f"call_{uuid.uuid4().hex[:24]}")


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _overlap(text: str, mark: str) -> int:
    """How many last characters of a text may begin a mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
