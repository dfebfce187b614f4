"""How a request's end is told from others that look the same, and that no reader costs nothing."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.front.metrics import Meters, TextMeter
from orchestrator.text.ledger import Ledger
from orchestrator.text.tally import Tally
from orchestrator.text.values import EmittedToken, FinishReason, Origin, Round
from tandem.errors import DrafterLost, IdleTimeout
from tandem.telemetry.instruments import Instruments


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
    meter = TextMeter(Meters(instruments), Ledger(), "fake", remaining)
    meter.fail(error)
    meter.end(None)
    assert ends(instruments) == {(status, ""): 1}


def test_what_fails_behind_its_last_message_has_failed() -> None:
    instruments = Instruments("orchestrator")
    meter = TextMeter(Meters(instruments), Ledger(), "fake")
    meter.finish(FinishReason.EOS)
    meter.fail(GeneratorExit())
    meter.end(None)
    assert ends(instruments) == {("CANCELLED", ""): 1}


def test_an_end_that_nobody_explains_is_a_bug_of_ours() -> None:
    instruments = Instruments("orchestrator")
    TextMeter(Meters(instruments), Ledger(), "fake").end(None)
    assert ends(instruments) == {("INTERNAL", ""): 1}


def test_without_meters_nothing_is_booked() -> None:
    meter, tally = TextMeter(None, Ledger(), "fake"), Tally()
    tally.add_round(0, 0, [], [])
    meter.accept(3)
    meter.commit(Round(0, [EmittedToken(1, Origin.BONUS, "")], 0, 0), tally)
    meter.lose_drafter()
    meter.fail(KeyError("bug"))
    meter.end(None)
