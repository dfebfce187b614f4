"""Processes that start, leave, drain and refuse to start."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.rpc.endpoint import Endpoint
from tandem.tools.local.process import ServiceProcess
from tandem.tools.local.readiness import is_improving, is_ready
from tests.support.processes.fork_server import Forked
from tests.support.processes.services import READY_SECONDS, Trio, generation, is_serving, trio

LONG = 200


@pytest.fixture(scope="module")
def services(
    random_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trio]:
    """One stack for all; who ends a service starts it again."""
    drafter, target = random_pair
    logs = tmp_path_factory.mktemp("logs")
    models = {"MODEL": str(drafter)}, {"MODEL": str(target)}
    with trio(logs, drafter=models[0], target=models[1]) as services:
        yield services


def long_text(seed: int = 0) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        generation=generation([1, 2, 3], max_new_tokens=LONG, seed=seed, gamma=3)
    )


def test_health_and_names(services: Trio) -> None:
    names = ("orchestrator", "drafter", "target")
    for process, name in zip(services.processes, names, strict=True):
        assert is_serving(process.address, "")
        assert is_serving(process.address, f"tandem.{name}.v1.{name.capitalize()}Service")


def test_a_client_that_leaves_and_a_deadline_leave_nothing_open(services: Trio) -> None:
    with services.client() as stub:
        call = stub.Generate(long_text())
        next(iter(call))
        services.wait_open(2)
        call.cancel()
        services.wait_idle()
        with pytest.raises(grpc.RpcError) as ended:
            list(stub.Generate(long_text(), timeout=0.3))
        assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        services.wait_idle()


def test_a_killed_orchestrator_leaves_nothing_open(services: Trio) -> None:
    with services.client() as stub:
        call = stub.Generate(long_text())
        next(iter(call))
        services.wait_open(2)
        services.orchestrator.kill()
        services.wait_idle()
    services.restart("orchestrator")


@pytest.mark.parametrize("victim", ["orchestrator", "drafter", "target"])
def test_sigterm_drains(services: Trio, victim: str) -> None:
    """Four texts under way finish, the process exits with 0."""
    finished: list[pb.Summary] = []

    def read(seed: int) -> None:
        with services.client() as stub:
            finished.append(list(stub.Generate(long_text(seed)))[-1].summary)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for reader in readers:
        reader.start()
    services.wait_open(8)
    assert getattr(services, victim).stop() == 0
    for reader in readers:
        reader.join()
    assert [summary.new_tokens for summary in finished] == [LONG] * 4
    assert not any(summary.drafter_lost for summary in finished)
    services.restart(victim)


@pytest.mark.campaign(
    "SIGTERM while a faster pass is compiled ends the process cleanly",
    "unit/inference/openvino: a signal during a pass",
)
def test_sigterm_while_a_faster_pass_is_looked_for(
    embedded_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves meanwhile, and what is compiled does not abort the process."""
    pytest.importorskip("openvino")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = {"MODEL": str(embedded_pair[1]), "ENGINE": "auto", "LOG_FORMAT": "json"}
    environment = {f"TANDEM_TARGET_{name}": value for name, value in settings.items()}
    service = ServiceProcess("target", "target_svc", "127.0.0.1", environment)
    deadline = time.monotonic() + READY_SECONDS
    while service.port is None or not is_ready("target", Endpoint(service.address)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert is_improving("target", Endpoint(service.address))
    time.sleep(1.0)  # into the compilation
    assert service.stop(10) == 0


def test_one_trace_across_three_processes(random_pair: tuple[Path, Path], tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in ("drafter", "target", "orchestrator")]
    drafter, target = random_pair
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with trio(
        tmp_path,
        drafter={"MODEL": str(drafter), "TRACE_FILE": str(files[0])},
        target={"MODEL": str(target), "TRACE_FILE": str(files[1])},
        orchestrator={"TRACE_FILE": str(files[2])},
    ) as services:
        with services.client() as stub:
            reply = stub.Complete(
                pb.CompleteRequest(
                    generation=generation([1, 2, 3], max_new_tokens=20, seed=0, gamma=3)
                ),
                metadata=(("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),),
            )
        assert [process.stop() for process in services.processes] == [0, 0, 0]
    every = [span for path in files for span in spans_of(path)]
    spans = {span["spanId"]: span for span in every if span["name"] != "pass"}
    assert {span["traceId"] for span in spans.values()} == {trace_id}
    assert {span["service"] for span in spans.values()} == {"drafter", "target", "orchestrator"}
    for name, parent in (
        ("call.draft", "round"),
        ("draft", "call.draft"),
        ("verify", "call.verify"),
        ("draft.forward", "draft"),
    ):
        children = [span for span in spans.values() if span["name"] == name]
        assert children
        assert {spans[span["parentSpanId"]]["name"] for span in children} == {parent}
    rounds = [span for span in spans.values() if span["name"] == "round"]
    assert len(rounds) == reply.summary.rounds - 1
    for span in spans.values():
        above = spans.get(span["parentSpanId"])
        if above is not None and above["service"] == span["service"]:
            assert int(above["startTimeUnixNano"]) <= int(span["startTimeUnixNano"])
            assert int(span["endTimeUnixNano"]) <= int(above["endTimeUnixNano"])

    served = [link["spanId"] for span in every if span["name"] == "pass" for link in span["links"]]
    steps = {key for key, span in spans.items() if span["name"] in ("draft", "verify", "prefill")}
    assert set(served) == steps


def spans_of(path: Path) -> Iterator[dict[str, Any]]:
    """The spans of a file of OTLP-JSON lines, each with its service's name."""
    for line in path.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            names = {
                attribute["key"]: attribute["value"].get("stringValue")
                for attribute in resource["resource"]["attributes"]
            }
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    yield {**span, "service": names["service.name"]}


def start_and_fail(module: str, **settings: str) -> tuple[int, str]:
    """Exit code and output of a service that cannot start."""
    process = Forked([module], {**os.environ, **settings}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        said = output.read().decode()
    return process.wait(READY_SECONDS), said


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"TANDEM_TARGET_MODEL": "/nowhere/at/all"}, "there is no /nowhere/at/all/config.json"),
        ({"TANDEM_TARGET_DEVICE": "abacus"}, "cannot use the device 'abacus'"),
        ({"TANDEM_TARGET_DEVICE": "cuda:99"}, "cannot use the device 'cuda:99'"),
        ({"TANDEM_TARGET_MAX_LENGTH": "-1"}, "TANDEM_TARGET_MAX_LENGTH"),
        ({"OTEL_TRACES_EXPORTER": "carrier_pigeon"}, "OTEL_TRACES_EXPORTER"),
        ({"TANDEM_TARGET_TRACE_FILE": "/proc/nowhere/trace"}, "cannot write the trace file"),
    ],
)
def test_what_cannot_start_exits_with_2_and_one_line(
    settings: dict[str, str], sentence: str
) -> None:
    code, output = start_and_fail("target_svc", TANDEM_TARGET_LOG_LEVEL="error", **settings)
    assert code == 2, output
    assert "Traceback" not in output
    assert sentence in output.strip().splitlines()[-1]


def test_corrupt_weights(random_pair: tuple[Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(random_pair[0], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    code, output = start_and_fail("drafter_svc", TANDEM_DRAFTER_MODEL=str(broken))
    assert code == 2, output
    assert "Traceback" not in output
    assert "cannot load the model" in output


@pytest.mark.parametrize("module", ["drafter_svc", "target_svc", "orchestrator"])
def test_a_port_that_is_taken_is_an_error(module: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        prefix = module.removesuffix("_svc").upper()
        listen = {f"TANDEM_{prefix}_LISTEN": f"127.0.0.1:{port}"}
        code, output = start_and_fail(module, **listen)
    assert code == 2, output
    assert f"cannot listen on 127.0.0.1:{port}" in output
    assert "Traceback" not in output
