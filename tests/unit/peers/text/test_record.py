"""How similar ends of requests are told apart, and that without readers nothing is recorded."""

from __future__ import annotations

import asyncio

import pytest

from tandem.errors import DrafterLost, IdleTimeout
from tandem.peers.text.metrics import RequestMetrics
from tandem.peers.text.record import GRPC, HTTP, TextRecord
from tandem.peers.text.values import EmittedToken, FinishReason, Origin, Round
from tandem.telemetry.metrics.instruments import Instruments


def ends(instruments: Instruments) -> dict[tuple[str, str], float]:
    (family,) = (f for f in instruments.registry.collect() if f.name == "tandem_requests")
    return {
        (sample.labels["status"], sample.labels["finish_reason"]): sample.value
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("error", "remaining", "status"),
    [
        (asyncio.CancelledError(), None, "CANCELLED"),
        (asyncio.CancelledError(), 1000.0, "CANCELLED"),
        (asyncio.CancelledError(), 0.0, "DEADLINE_EXCEEDED"),
        (GeneratorExit(), 1000.0, "CANCELLED"),
        (GeneratorExit(), 0.0, "DEADLINE_EXCEEDED"),
        (IdleTimeout("silent"), 0.0, "ABORTED"),
        (DrafterLost("gone"), None, "UNAVAILABLE"),
        (KeyError("bug"), 0.0, "INTERNAL"),
    ],
)
def test_a_passed_deadline_is_no_client_that_left(
    error: BaseException, remaining: float | None, status: str
) -> None:
    """Both are a cancellation here, and gRPC says no more."""
    instruments = Instruments("orchestrator")
    record = TextRecord(None, RequestMetrics(instruments), "fake", remaining)
    record.fail(error)
    record.end()
    assert ends(instruments) == {(status, ""): 1}


def test_what_fails_behind_its_last_message_has_failed() -> None:
    instruments = Instruments("orchestrator")
    record = TextRecord(None, RequestMetrics(instruments), "fake")
    record.finish(FinishReason.EOS)
    record.fail(GeneratorExit())
    record.end()
    assert ends(instruments) == {("CANCELLED", ""): 1}


def test_an_end_that_nobody_explains_is_a_bug_of_ours() -> None:
    instruments = Instruments("orchestrator")
    TextRecord(None, RequestMetrics(instruments), "fake").end()
    assert ends(instruments) == {("INTERNAL", ""): 1}


def test_fronts_are_told_apart() -> None:
    instruments = Instruments("orchestrator")
    for front in (GRPC, HTTP, HTTP):
        TextRecord(None, RequestMetrics(instruments), "fake", front=front).end()
    (family,) = (f for f in instruments.registry.collect() if f.name == "tandem_requests")
    assert {s.labels["front"]: s.value for s in family.samples} == {"grpc": 1, "http": 2}


def test_a_round_without_tokens_is_a_round() -> None:
    instruments = Instruments("orchestrator")
    record = TextRecord(None, RequestMetrics(instruments), "fake")
    record.counts.add_round(2, 2, [], [])
    record.commit(Round(1, [], 2, 2))
    (family,) = (f for f in instruments.registry.collect() if f.name == "tandem_rounds")
    assert [sample.value for sample in family.samples] == [1]


def test_without_metrics_nothing_is_booked() -> None:
    record = TextRecord()
    record.counts.add_round(0, 0, [], [])
    record.begin(3)
    record.commit(Round(0, [EmittedToken(1, Origin.BONUS, "")], 0, 0))
    record.lose_drafter()
    record.fail(KeyError("bug"))
    record.end()


def test_what_is_found_at_the_first_opening_counts() -> None:
    """A text that moves may find itself."""
    instruments = Instruments("orchestrator")
    record = TextRecord(None, RequestMetrics(instruments), "fake")
    for role, tokens in (("target", 32), ("drafter", 0), ("drafter", 48), ("target", 64)):
        record.note_cached(role, tokens)
    assert record.counts.cached_tokens == {"target": 32, "drafter": 0}
    (family,) = (f for f in instruments.registry.collect() if f.name == "tandem_tokens_cached")
    assert {s.labels["role"]: s.value for s in family.samples} == {"target": 32, "drafter": 0}
