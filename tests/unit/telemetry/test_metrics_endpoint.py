"""The endpoint that Prometheus reads: its clients, its formats, a port that is taken."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request

import pytest

from tandem.telemetry.metrics.exposition import Exposition
from tests.support.processes.refusals import refusal
from tests.support.waiting import HANG_SECONDS
from tests.unit.telemetry.recorded_metrics import TRACED, recorded

pytestmark = pytest.mark.usefixtures("no_otel")


def test_a_service_whose_metrics_port_is_taken_exits_with_2_and_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        variables = {"LISTEN": "127.0.0.1:0", "METRICS_LISTEN": listen}
        ours = {f"TANDEM_ORCHESTRATOR_{name}": value for name, value in variables.items()}
        line = refusal("orchestrator", ours)
    assert line.startswith(f"orchestrator: cannot serve metrics on {listen}: ")
    assert "METRICS_LISTEN" in line


def test_clients_that_dribble_stop_neither_the_scrapes_nor_the_end() -> None:
    """A byte now and then never times out by itself."""
    served = Exposition("127.0.0.1:0", recorded().registry)
    clients = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(3)]
    for client in clients:
        client.send(b"G")
    with urllib.request.urlopen(
        f"http://127.0.0.1:{served.port}/metrics", timeout=HANG_SECONDS
    ) as reply:
        assert b"tandem" in reply.read()
    for client in clients:
        client.send(b"E")
    stopping = threading.Thread(target=served.stop)
    stopping.start()
    stopping.join(30)
    assert not stopping.is_alive()
    for client in clients:
        client.close()


def test_more_clients_than_there_are_places_are_hung_up_on() -> None:
    served = Exposition("127.0.0.1:0", recorded().registry)
    clients = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(12)]
    assert any(client.recv(1) == b"" for client in clients[-1:])
    for client in clients:
        client.close()
    served.stop()


def test_a_client_that_says_nothing_does_not_stop_the_scrapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.telemetry.metrics.exposition._Quiet.timeout", 0.1)
    served = Exposition("127.0.0.1:0", recorded().registry)
    try:
        with socket.create_connection(("127.0.0.1", served.port)):
            url = f"http://127.0.0.1:{served.port}/metrics"
            with urllib.request.urlopen(url, timeout=HANG_SECONDS) as reply:
                assert b"tandem_rounds_total 3.0" in reply.read()
        posted = urllib.request.Request(url, data=b"x")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(posted, timeout=HANG_SECONDS)
    finally:
        served.stop()


def test_the_plain_format_has_no_exemplars_and_the_open_one_has() -> None:
    served = Exposition(
        "[::1]:0" if socket.has_dualstack_ipv6() else "127.0.0.1:0", recorded().registry
    )
    host = "[::1]" if socket.has_dualstack_ipv6() else "127.0.0.1"
    try:
        texts = []
        for accept in ("text/plain", "application/openmetrics-text"):
            asked = urllib.request.Request(
                f"http://{host}:{served.port}/metrics", headers={"Accept": accept}
            )
            with urllib.request.urlopen(asked, timeout=HANG_SECONDS) as reply:
                texts.append(reply.read().decode())
    finally:
        served.stop()
    assert [TRACED["trace_id"] in text for text in texts] == [False, True]
