"""A short run of `make fuzz`, always the same."""

from __future__ import annotations

import asyncio

import pytest

from tests.fuzz.__main__ import Run
from tests.fuzz.read.surfaces import SURFACES
from tests.fuzz.streams import walk

# Of those that take few CPU cycles for a message, and of those with models and sockets.
MANY, FEW = 800, 150
SLOW = ("verify", "drafting", "socket")


@pytest.mark.parametrize("name", SURFACES)
def test_mutated_messages_are_answered_as_documented(name: str) -> None:
    run = Run(seed=15)
    surface = SURFACES[name]()
    asyncio.run(run.go_through(surface, iter(range(FEW if name in SLOW else MANY))))
    assert run.violations == []
    assert len(run.statuses[name]) >= 2, "nothing but one answer to all of them"
    assert run.statuses[name]["OK"] > 0


def test_streams_keep_their_states_whatever_is_said() -> None:
    told = walk(15, walks=10, steps=40, shrink=False)
    assert set(told) >= {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION"}
