"""What `deploy/` says agrees with the code: settings, ports, names, times."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from drafter_svc.settings import DrafterSettings
from orchestrator.settings import OrchestratorSettings
from tandem.drafter.v1 import drafter_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.settings import ServiceSettings
from tandem.target.v1 import target_pb2
from tandem.telemetry.export import make_writer
from target_svc.settings import TargetSettings

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
SERVICES = ("drafter", "target", "orchestrator")
SETTINGS: dict[str, type[ServiceSettings]] = {
    "drafter": DrafterSettings,
    "target": TargetSettings,
    "orchestrator": OrchestratorSettings,
}
GRPC_NAMES = {
    "drafter": drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name,
    "target": target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
    "orchestrator": pb.DESCRIPTOR.services_by_name["OrchestratorService"].full_name,
}


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(KUBERNETES.glob("*.yaml")):
        if path.name != "kustomization.yaml":
            for document in yaml.safe_load_all(path.read_text()):
                yield path.name, document


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        document
        for _, document in manifests()
        if document["kind"] == kind and document["metadata"]["name"] == name
    ]
    return found


def pod(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = manifest("Deployment", name)["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["containers"]
    return dict(only)


def environment(name: str) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(name)["env"] if "value" in entry}


def settings_of(name: str, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """The settings object that a pod's environment makes."""
    for variable, value in environment(name).items():
        monkeypatch.setenv(variable, value)
    return SETTINGS[name]()


@pytest.mark.parametrize(("path", "document"), list(manifests()), ids=lambda value: str(value)[:40])
def test_manifests_are_valid(path: str, document: dict[str, Any]) -> None:
    newest = kubernetes_validate.latest_version()
    kubernetes_validate.validate(document, newest, strict=True)


def test_kustomization_lists_what_is_there() -> None:
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    there = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == there
    assert kustomization["namespace"] == manifest("Namespace", "tandem")["metadata"]["name"]


def known_variables() -> set[str]:
    return {
        f"{kind.model_config['env_prefix']}{field.upper()}"
        for kind in SETTINGS.values()
        for field in kind.model_fields
    }


def test_every_variable_is_a_setting() -> None:
    sources = [CONTAINERFILE, *(path.read_text() for path in KUBERNETES.glob("*.yaml"))]
    used = {name for source in sources for name in re.findall(r"\bTANDEM_[A-Z_]+", source)}
    assert used
    assert used <= known_variables()


@pytest.mark.parametrize("name", SERVICES)
def test_ports_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host, _, port = settings_of(name, monkeypatch).listen.rpartition(":")
    assert host == "0.0.0.0"
    (opened,) = container(name)["ports"]
    (served,) = manifest("Service", name)["spec"]["ports"]
    assert opened["containerPort"] == served["port"] == int(port)
    assert served["targetPort"] == opened["name"]
    assert f"ENV TANDEM_{name.upper()}_LISTEN=0.0.0.0:{port}\nEXPOSE {port}\n" in CONTAINERFILE


@pytest.mark.parametrize("name", SERVICES)
def test_selectors_agree(name: str) -> None:
    deployment, service = manifest("Deployment", name), manifest("Service", name)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    headless = service["spec"].get("clusterIP") == "None"
    assert headless == (name != "orchestrator")


def test_orchestrator_finds_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of("orchestrator", monkeypatch)
    assert isinstance(settings, OrchestratorSettings)
    for name, addresses in (("drafter", settings.drafters), ("target", settings.targets)):
        (port,) = manifest("Service", name)["spec"]["ports"]
        assert addresses == (f"dns:///{name}:{port['port']}",)


@pytest.mark.parametrize("name", SERVICES)
def test_probes_ask_the_right_service(name: str) -> None:
    (port,) = container(name)["ports"]
    for probe in ("startupProbe", "readinessProbe"):
        expected = {"port": port["containerPort"], "service": GRPC_NAMES[name]}
        assert container(name)[probe]["grpc"] == expected
    assert container(name)["livenessProbe"]["grpc"] == {"port": port["containerPort"]}


@pytest.mark.parametrize("name", SERVICES)
def test_a_drain_fits_its_limits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drain = settings_of(name, monkeypatch).drain_seconds
    before = container(name)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod(name)["terminationGracePeriodSeconds"] >= before + drain + 10
    # A drain turns "" off: the liveness probe must not end the pod before.
    liveness = container(name)["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > drain


@pytest.mark.parametrize("name", SERVICES)
def test_containers_are_confined(name: str) -> None:
    box = container(name)
    assert re.fullmatch(rf"tandem-{name}:\d+\.\d+\.\d+", box["image"])
    assert box["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    shared = pod(name)["securityContext"]
    assert shared["runAsNonRoot"] is True
    assert f"USER {shared['runAsUser']}:{shared['runAsGroup']}\n" in CONTAINERFILE
    assert box["resources"]["requests"]["memory"] == box["resources"]["limits"]["memory"]


@pytest.mark.parametrize("name", SERVICES)
def test_images_hold_what_they_run(name: str) -> None:
    stages = dict(re.findall(r"^FROM .* AS (\S+)\n((?:(?!FROM ).*\n)*)", CONTAINERFILE, re.M))
    module = {"drafter": "drafter_svc", "target": "target_svc"}.get(name, name)
    assert f'ENTRYPOINT ["python", "-m", "{module}"]' in stages[name]
    assert f"COPY {module}/ {module}/" in stages[name]
    base = "build-base" if name == "orchestrator" else "build-inference"
    assert f"COPY --from={base} " in stages[name]
    assert "inference" not in stages["build-base"]
    for build in ("build-base", "build-inference"):
        assert "--require-hashes" in stages[build]
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE, re.M)
    ignored = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    for path in " ".join(copied).split():
        assert f"!{path.rstrip('/')}" in ignored


def test_base_image_is_pinned() -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", CONTAINERFILE, re.M)
    assert re.search(r":\d+\.\d+-slim$", base)


def test_settings_need_no_torch() -> None:
    program = (
        "import sys, drafter_svc.settings, target_svc.settings, orchestrator.settings;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=DEPLOY.parent)


def test_the_telemetry_that_is_configured_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands nothing is recorded; with the exporter that its comment names, spans go out."""
    for name, value in manifest("ConfigMap", "telemetry")["data"].items():
        monkeypatch.setenv(name, value)
    assert make_writer("target", None) is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    writer = make_writer("target", None)
    assert writer is not None
    writer.close()
    for service in SERVICES:
        (container,) = pod(service)["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": "telemetry"}}]
