"""Calls of tools in what a model writes, in the two commonest formats.

Hermes' (Qwen, NousResearch): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere.
Llama 3's: the whole text is `{"name": ..., "parameters": {...}}`, or several with `;` in between.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_BEGIN, _END = "<tool_call>", "</tool_call>"
_LLAMA = "{"


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool.

    Attributes:
        name: of the tool.
        arguments: JSON, as the model wrote them.
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


class ToolReader:
    """Tells text from calls, as the text comes. What may be a call is held until it is known.

    Args:
        looks: whether it looks for calls; else all is text.
    """

    def __init__(self, looks: bool) -> None:
        self._looks = looks
        self._held = ""
        self._began = False  # something was told that is not blank

    def push(self, text: str, *, last: bool = False) -> tuple[str, list[ToolCall]]:
        """Text, and calls that are whole.

        Args:
            text: that came.
            last: nothing more comes.
        """
        if not self._looks:
            return text, []
        self._held += text
        start = self._held.lstrip()
        if not self._began and not last and (not start or start.startswith(_LLAMA)):
            return "", []
        if not self._began and (calls := _llama_calls(start)):
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
            inside, end, behind = rest.partition(_END)
            if not end and not last:
                self._held = begin + rest
                yield before, None
                return
            call = _call_of(inside, "arguments")
            self._held = behind
            # What is no call after all is text.
            yield (before, call) if call else (before + begin + inside + end, None)


def _overlap(text: str, mark: str) -> int:
    """How many last characters of a text may begin a mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def _llama_calls(text: str) -> list[ToolCall]:
    """The calls that a whole text is; none if it is anything else."""
    decoder, at, calls = json.JSONDecoder(), 0, []
    text = text.strip()
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        call = _call_of(text[at:end], "parameters", "arguments")
        if call is None:
            return []
        calls.append(call)
        at = end
        while at < len(text) and text[at] in "; \n\t":
            at += 1
    return calls


def _call_of(text: str, *keys: str) -> ToolCall | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments: Any = next((found[key] for key in keys if key in found), {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(found["name"], arguments, f"call_{uuid.uuid4().hex[:24]}")
