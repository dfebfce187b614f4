"""What `tandem top` computes from metrics."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tandem.telemetry.metrics import catalog as metrics
from tandem.telemetry.metrics.exposition import Exposition
from tandem.telemetry.metrics.instruments import Instruments
from tandem.tools.watch.figures import WatchedFigures, figures
from tandem.tools.watch.scrape import Scrape, scrape


@contextmanager
def serving(instruments: Instruments) -> Iterator[str]:
    served = Exposition("127.0.0.1:0", instruments.registry)
    try:
        yield f"127.0.0.1:{served.port}"
    finally:
        served.stop()


def orchestrator() -> Instruments:
    instruments = Instruments(metrics.ORCHESTRATOR)
    instruments.histogram(metrics.EVENT_LOOP_LAG, metrics.ORCHESTRATOR).observe(0)
    instruments.watch(metrics.REQUESTS_ACTIVE, lambda: 3)
    return instruments


def target(used: int) -> Instruments:
    instruments = Instruments(metrics.TARGET)
    role = metrics.TARGET
    instruments.histogram(metrics.EVENT_LOOP_LAG, role).observe(0)
    instruments.watch(metrics.SEQUENCES_OPEN, lambda: 2, role)
    instruments.watch(metrics.QUEUE_DEPTH, lambda: 1, role)
    instruments.watch(metrics.KV_POSITIONS, lambda: used, role, "used")
    instruments.watch(metrics.KV_POSITIONS, lambda: 100 - used, role, "free")
    instruments.watch(metrics.KV_PROMISED, lambda: 4 * used, role)
    instruments.watch(metrics.KV_LONGEST, lambda: 100 - used, role)
    return instruments


def looked_at(*all_instruments: Instruments, at: float) -> dict[str, Scrape]:
    found = {}
    for place, instruments in enumerate(all_instruments):
        with serving(instruments) as endpoint:
            found[f"{place}"] = Scrape(at, scrape(endpoint, 10).values)
    return found


def test_figures_are_of_the_time_between_two_looks() -> None:
    own, first, second = orchestrator(), target(25), target(75)
    counter = own.counter
    counter(metrics.TOKENS_EMITTED, "accepted").value += 1000
    counter(metrics.NUM_DRAFTS).value += 100
    counter(metrics.REQUESTS, "OK", "eos", "grpc").value += 7
    before = looked_at(own, first, second, at=10.0)
    counter(metrics.TOKENS_EMITTED, "accepted").value += 30
    counter(metrics.TOKENS_EMITTED, "bonus").value += 10
    counter(metrics.ROUNDS).value += 10
    counter(metrics.NUM_DRAFTS).value += 10
    counter(metrics.NUM_DRAFT_TOKENS).value += 40
    counter(metrics.NUM_ACCEPTED_TOKENS).value += 30
    counter(metrics.TOKENS_PROMPT).value += 80
    counter(metrics.TOKENS_CACHED, "target").value += 60
    counter(metrics.TOKENS_CACHED, "drafter").value += 70
    counter(metrics.REQUESTS, "OK", "eos", "grpc").value += 3
    counter(metrics.REQUESTS, "CANCELLED", "", "grpc").value += 1
    for size in (1, 2, 3):
        first.histogram(metrics.BATCH_SIZE, metrics.TARGET).observe(size)
    for stage, seconds in (("queue", 0.001), ("forward", 0.003)):
        of = (metrics.TARGET, "verify", stage)
        for _ in range(2):
            first.histogram(metrics.STAGE_DURATION, *of).observe(seconds)
    seen = figures(before, looked_at(own, first, second, at=12.0))
    assert seen.seconds == 2
    assert (seen.tokens, seen.rounds, seen.requests, seen.failed) == (20, 5, 2, 0.5)
    assert (seen.acceptance, seen.block_efficiency, seen.cached) == (0.75, 4, 0.75)
    front, targets = seen.services
    assert (front.role, front.replicas, front.open, front.kv_share) == ("orchestrator", 1, 3, None)
    assert (targets.role, targets.replicas, targets.open, targets.waiting) == ("target", 2, 4, 2)
    assert (targets.kv_share, targets.promised, targets.batch) == (0.5, 2, 2)
    assert (front.longest, targets.longest) == (None, 75)
    assert [stage.name for stage in seen.stages] == ["verify.forward", "verify.queue"]
    assert [stage.share for stage in seen.stages] == pytest.approx([0.75, 0.25])
    assert seen.stages[0].seconds == pytest.approx(0.003)


def test_nothing_happened() -> None:
    before = looked_at(orchestrator(), target(0), at=1.0)
    seen = figures(before, {**before})
    assert seen == WatchedFigures(0.0, 0.0, 0.0, 0.0, 0.0, None, None, None, seen.services, [])


def test_a_service_that_is_back_has_made_what_it_counts() -> None:
    """Its counters begin at 0, and a rate is never negative."""
    own = orchestrator()
    own.counter(metrics.TOKENS_EMITTED, "bonus").value += 500
    before = looked_at(own, at=1.0)
    again = orchestrator()
    again.counter(metrics.TOKENS_EMITTED, "bonus").value += 8
    assert figures(before, looked_at(again, at=3.0)).tokens == 4
    # Also what has by now been counted more often than before.
    again.counter(metrics.ROUNDS).value += 6
    own.counter(metrics.ROUNDS).value += 4
    assert figures(looked_at(own, at=1.0), looked_at(again, at=3.0)).rounds == 3
    # One that was away at the first look has no rate yet.
    assert figures({}, looked_at(again, at=3.0)).tokens == 0


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 404 Not Found\r\n\r\n"])
def test_what_is_no_endpoint_is_said_to_be_none(answer: bytes) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def reply() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises((OSError, ValueError)):
            scrape(f"127.0.0.1:{listening.getsockname()[1]}", 10)
        thread.join()
