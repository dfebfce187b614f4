"""Calls of tools in a model's text, however it is cut into parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.front.http.tools import ToolCall, ToolReader, names_of

CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
LLAMA = '{"name": "weather", "parameters": {"city": "Köln"}}'
# No JSON, though Python reads it.
NAN = '{"name": "weather", "parameters": {"a": NaN}}'
HUGE = '{"name": "weather", "parameters": {"a": 1e999}}'

# A text, what is told of it, and the names of the tools that it calls.
TEXTS: list[tuple[str, str, list[str]]] = [
    ("plain text, a < b", "plain text, a < b", []),
    (HERMES, "", ["weather"]),
    (f"Let me see. {HERMES}", "Let me see. ", ["weather"]),
    (f"{HERMES}\n{HERMES}", "", ["weather", "weather"]),
    (f"{HERMES} and more", " and more", ["weather"]),
    (f"<tool_call>{CALL}", "", ["weather"]),  # the end token is not shown
    ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ("<tool_cal", "<tool_cal", []),
    (LLAMA, "", ["weather"]),
    (f"  {LLAMA}", "", ["weather"]),
    (f"{LLAMA}; {LLAMA}", "", ["weather", "weather"]),
    ('{"a": 1}', '{"a": 1}', []),
    ('{"name": 1}', '{"name": 1}', []),
    ("{ not JSON", "{ not JSON", []),
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ('{"name": "weather"}', '{"name": "weather"}', []),
    ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
    (
        '{"name": "weather", "parameters": {"a": NaN}}',
        '{"name": "weather", "parameters": {"a": NaN}}',
        [],
    ),
    (
        '{"name": "weather", "parameters": {"a": 1e999}}',
        '{"name": "weather", "parameters": {"a": 1e999}}',
        [],
    ),
    (f"{LLAMA} and more", f"{LLAMA} and more", []),
    ("", "", []),
    ("  \n", "  \n", []),
]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize(("text", "told", "names"), TEXTS)
def test_text_and_calls(text: str, told: str, names: list[str], size: int) -> None:
    reader, found = ToolReader({"weather"}), ""
    calls: list[ToolCall] = []
    for i in range(0, len(text), size):
        part, more = reader.push(text[i : i + size])
        found, calls = found + part, calls + more
    part, more = reader.push("", last=True)
    found, calls = found + part, calls + more
    assert [call.name for call in calls] == names
    assert all(json.loads(call.arguments) == {"city": "Köln"} for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    if names:  # blanks around calls come or not, as the text is cut
        assert found.strip() == told.strip()
    else:
        assert found == told


def test_the_mark_of_the_end_may_be_in_an_argument() -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"a": "</tool_call>"}}</tool_call> x'
    told, (found,) = ToolReader({"weather"}).push(call, last=True)
    assert (told, json.loads(found.arguments)) == (" x", {"a": "</tool_call>"})


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("text", [f"a {HERMES}\n{HERMES} b", f"{LLAMA}; {LLAMA}"])
def test_calls_beyond_the_most_are_not_told(text: str, size: int) -> None:
    reader, calls = ToolReader({"weather"}, 1), list[ToolCall]()
    for i in range(0, len(text), size):
        calls += reader.push(text[i : i + size])[1]
    calls += reader.push("", last=True)[1]
    assert [call.name for call in calls] == ["weather"]


def test_arguments_may_be_missing_or_text() -> None:
    for arguments, wanted in (("null", "{}"), ('"{}"', "{}")):
        text = f'{{"name": "weather", "parameters": {arguments}}}'
        _, (call,) = ToolReader({"weather"}).push(text, last=True)
        assert call.arguments == wanted


def test_names_are_those_of_functions() -> None:
    described: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "a"}},
        {"function": 1},
        {},
    ]
    assert names_of(described) == {"a"}
    assert names_of(None) == frozenset()


def test_text_is_told_as_it_comes() -> None:
    reader = ToolReader({"weather"})
    assert reader.push("a <")[0] == "a "
    assert reader.push(" b")[0] == "< b"


def test_nothing_is_held_where_nobody_looks() -> None:
    reader: Any = ToolReader()
    assert reader.push(HERMES) == (HERMES, [])
