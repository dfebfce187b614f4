"""The benchmark of chats: what turns add, and what comes of their times. Needs no engine."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, cast

from benchmarks.chats import Turn, Way, chat_turns, medians, whole_chats, write_chat
from benchmarks.peers.protocol import Generate
from benchmarks.peers.worker import Worker

OPTIONS = Namespace(system=10, question=3, tool=5, turns=3)


class Writer:
    """A worker that counts, and knows what it was asked before."""

    def __init__(self, told: bool) -> None:
        self.asked: list[Generate] = []
        self._told = told

    def ask(self, ask: Generate, timeout_s: float) -> dict[str, Any]:
        cached = max((len(before.prompts[0]) for before in self.asked), default=0)
        self.asked.append(ask)
        summary = {"cached_tokens": cached, "drafter_cached_tokens": 1} if self._told else None
        times = {"intended_s": 1.0, "asked_s": 1.0, "arrivals": [[1.5, 1], [2.0, 2]]}
        timeline = times | {"ended_s": 2.0, "error": "", "summary": summary}
        return {"texts": [[7, 8, 9]], "timelines": [timeline]}


def test_chats_have_a_system_prompt_and_nothing_else_in_common() -> None:
    ids = range(1000)
    one, other = (chat_turns(ids, chat, OPTIONS) for chat in (0, 1))
    assert [len(turn) for turn in one] == [13, 5, 3]
    assert one[0][:10] == other[0][:10] == [*range(10)]
    assert not {*one[0][10:], *one[1], *one[2]} & {*other[0][10:], *other[1], *other[2]}


def test_a_turn_begins_with_all_that_came_before() -> None:
    writer = Writer(told=True)
    turns = list(
        write_chat(cast("Worker", writer), Way("x", True, 4), [[1, 2], [3], [4]], 99, answer=2)
    )
    assert [ask.prompts[0] for ask in writer.asked] == [
        (99, 1, 2),
        (99, 1, 2, 7, 8, 3),
        (99, 1, 2, 7, 8, 3, 7, 8, 4),
    ]
    assert turns[1] == Turn(6, 500.0, 1000.0, 3, 1)


def test_an_engine_that_does_not_say_what_it_found_has_no_count() -> None:
    (turn,) = write_chat(cast("Worker", Writer(told=False)), Way("x", True, 4), [[1]], 9, 2)
    assert (turn.cached, turn.drafter_cached) == (None, None)
    assert medians([turn, turn]) == turn


def test_chats_add_up_and_are_compared_with_cold_ones() -> None:
    rows = [
        {"engine": "x", "cache": cache, "gamma": 0, "turn": turn}
        | {"first_ms": first * turn, "whole_ms": 500.0}
        for cache, first in (("on", 10.0), ("off", 100.0))
        for turn in (1, 2, 3)
    ]
    warm, cold = whole_chats(rows)
    assert (warm["chat_s"], warm["first_token_over_cold"]) == (1.5, 0.1)
    assert (cold["chat_s"], cold["first_token_over_cold"]) == (1.5, 1.0)
