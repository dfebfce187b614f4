"""How long a text looks for an orchestrator to resume at, and its error when it finds none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest

from tandem.client import blocking
from tandem.client.blocking import Client
from tandem.client.errors import CallFailed, Lost, Refused
from tandem.orchestrator.v1 import orchestrator_pb2 as pb


class FakeClient:
    """An orchestrator that dies after the first round, and what answers from then on."""

    def __init__(self, then: Callable[[], CallFailed]) -> None:
        self.calls = 0
        self._then = then

    def __call__(self, place: object) -> Self:
        return self

    def open(self, seconds: float) -> None: ...

    def generate(self, asked: pb.Generation, seconds: float | None) -> Iterator[Any]:
        self.calls += 1
        if self.calls > 1:
            raise self._then()
        yield pb.GenerateResponse(round=pb.Round(round=0, tokens=[pb.Token(id=7)]))
        raise Lost("UNAVAILABLE: gone")


def test_its_deadline_ends_the_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient(lambda: Lost("nobody"))
    monkeypatch.setattr(blocking, "Connection", client)
    began = time.monotonic()
    with pytest.raises(Lost, match="UNAVAILABLE: gone"):
        list(Client("here", resume_seconds=600.0).events(pb.Generation(), timeout_s=0.5))
    assert time.monotonic() - began < 60
    assert client.calls > 1


def test_who_cannot_go_on_says_what_was_lost_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    no = Refused("INVALID_ARGUMENT: no")
    monkeypatch.setattr(blocking, "Connection", FakeClient(lambda: no))
    expected = "UNAVAILABLE: gone; it could not go on: INVALID_ARGUMENT: no"
    with pytest.raises(Refused, match=expected):
        list(Client("here", resume_seconds=600.0).events(pb.Generation()))
