"""deploy/compose.yaml against the code, the images and the files that it mounts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from drafter_svc.settings import DrafterSettings
from orchestrator.settings import OrchestratorSettings
from tandem import __version__
from tandem.settings import ServiceSettings
from target_svc.settings import TargetSettings
from tests.support.cluster.containerfile import CONTAINERFILE
from tests.unit.deploy.test_images import DEPLOY

SERVICES = ("drafter", "target", "orchestrator")
SETTINGS: dict[str, type[ServiceSettings]] = {
    "drafter": DrafterSettings,
    "target": TargetSettings,
    "orchestrator": OrchestratorSettings,
}

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
ALL: dict[str, dict[str, Any]] = COMPOSE["services"]
PROMETHEUS = yaml.safe_load((DEPLOY / "observability/compose/prometheus.yml").read_text())


@pytest.mark.parametrize("name", SERVICES)
def test_a_services_variables_are_its_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = f"TANDEM_{name.upper()}_"
    own = {k: v for k, v in ALL[name]["environment"].items() if k.startswith("TANDEM_")}
    assert own
    for variable, value in own.items():
        assert variable.removeprefix(prefix).lower() in SETTINGS[name].model_fields, variable
        monkeypatch.setenv(variable, value)
    SETTINGS[name]()


def test_the_orchestrator_asks_the_others_where_their_images_listen() -> None:
    environment = ALL["orchestrator"]["environment"]
    for name in ("drafter", "target"):
        port = environment[f"TANDEM_ORCHESTRATOR_{name.upper()}S"].removeprefix(f"dns:///{name}:")
        assert f"TANDEM_{name.upper()}_LISTEN=0.0.0.0:{port}\n" in CONTAINERFILE


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_confined_and_has_time_to_drain(name: str) -> None:
    service = ALL[name]
    assert service["image"] == f"tandem-{name}:{__version__}"
    assert f"AS {name}\n" in CONTAINERFILE
    assert service["build"]["target"] == name
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    seconds = float(service["stop_grace_period"].removesuffix("s"))
    assert seconds >= SETTINGS[name]().drain_seconds + 10


def test_what_is_mounted_is_there_and_only_to_be_read() -> None:
    mounts = [mount for service in ALL.values() for mount in service.get("volumes", ())]
    assert len(mounts) == 5
    for mount in mounts:
        source, _, mode = mount.split(":")
        assert (DEPLOY / source).is_file(), mount
        assert mode == "ro"


def test_ports_are_on_loopback() -> None:
    for service in ALL.values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), port


def test_every_service_is_scraped_and_images_are_pinned() -> None:
    (job,) = PROMETHEUS["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert sorted(found["names"]) == sorted(SERVICES)
    for name in SERVICES:
        listen = ALL[name]["environment"][f"TANDEM_{name.upper()}_METRICS_LISTEN"]
        assert listen == f"0.0.0.0:{found['port']}"
    for service in ALL.values():
        assert service["image"].rpartition(":")[2] not in ("", "latest")


def test_grafana_reads_what_compose_runs() -> None:
    folder = DEPLOY / "observability" / "compose"
    sources = yaml.safe_load((folder / "grafana-datasources.yml").read_text())["datasources"]
    assert [source["url"].split("/")[2].split(":")[0] for source in sources] == [
        "prometheus",
        "jaeger",
    ]
    (provider,) = yaml.safe_load((folder / "grafana-dashboards.yml").read_text())["providers"]
    mounted = [mount.split(":")[1] for mount in ALL["grafana"]["volumes"]]
    assert any(Path(path).parent == Path(provider["options"]["path"]) for path in mounted)
