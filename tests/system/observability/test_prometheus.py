"""Where Prometheus is installed: it scrapes all three services."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.support.processes.ports import free_ports
from tests.support.processes.services import Trio, generation, trio
from tests.unit.deploy.test_observability import FOLDER, QUERIES

pytestmark = [
    pytest.mark.campaign(
        "a real Prometheus scrapes all three services",
        "unit/deploy: rules and dashboards; unit/telemetry",
    ),
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="prometheus and promtool are not installed (Debian: apt-get install prometheus)",
    ),
]

# Instead of Grafana's, for a run of seconds.
RATE_WINDOW = "20s"
SECONDS = 60


class Prometheus:
    """Its API."""

    def __init__(self, port: int) -> None:
        self._api = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self._api}/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.load(reply)["data"]

    def answers(self) -> bool:
        try:
            return bool(self.get("targets"))
        except (urllib.error.URLError, ConnectionError):
            return False

    def all_up(self) -> bool:
        found = self.get("targets")["activeTargets"]
        return [target["health"] for target in found] == ["up"] * 3

    def has(self, query: str) -> bool:
        """Whether a query returns a number."""
        found = self.get("query", query=query.replace("$__rate_interval", RATE_WINDOW))
        return any(sample["value"][1] != "NaN" for sample in found["result"])


@contextmanager
def prometheus(folder: Path, port: int, endpoints: list[str]) -> Iterator[Prometheus]:
    """One with our own configuration, but for the addresses and the pace."""
    settings = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(FOLDER / "rules.yml")]
    settings["scrape_configs"][0]["static_configs"] = [{"targets": endpoints}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(settings))
    command = ["prometheus", "--config.file", str(path), "--storage.tsdb.path", str(folder / "db")]
    command += ["--web.listen-address", f"127.0.0.1:{port}"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield Prometheus(port)
        finally:
            process.terminate()


def complete(services: Trio, until: Any) -> None:
    """Ask for texts until something holds."""
    deadline = time.monotonic() + SECONDS
    asked = generation([1, 2], max_new_tokens=40, gamma=4)
    with services.client() as stub:
        while not until():
            assert time.monotonic() < deadline
            for _ in range(3):
                stub.Complete(pb.CompleteRequest(generation=asked), timeout=30)
            time.sleep(0.2)


def test_rules_and_configuration_are_sound() -> None:
    for command in (["check", "rules", "rules.yml"], ["check", "config", "prometheus.yml"]):
        result = subprocess.run(
            ["promtool", *command], cwd=FOLDER, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_a_prometheus_reads_what_is_asked_of_it(
    tmp_path: Path, random_pair: tuple[Path, Path]
) -> None:
    own, *ports = free_ports(4)
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    settings = [{"METRICS_LISTEN": endpoint} for endpoint in endpoints]
    settings[0]["MODEL"], settings[1]["MODEL"] = map(str, random_pair)
    drafter, target, orchestrator = settings
    with (
        trio(tmp_path, drafter=drafter, target=target, orchestrator=orchestrator) as services,
        prometheus(tmp_path, own, endpoints) as reader,
    ):
        for endpoint in endpoints:
            with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as reply:
                text = reply.read()
            result = subprocess.run(
                ["promtool", "check", "metrics"], input=text, capture_output=True, check=False
            )
            assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
        complete(services, lambda: reader.answers() and reader.all_up())
        # An alert is a query that has no answer as long as all is well.
        wanted = {query for name, query in QUERIES if not name.startswith("Tandem")}
        complete(services, lambda: all(map(reader.has, wanted)))
        rules = reader.get("rules")["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}
