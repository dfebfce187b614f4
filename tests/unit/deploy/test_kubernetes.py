"""What the manifests promise: the base files, and the overlays as kustomize renders them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from orchestrator.settings import OrchestratorSettings
from tandem.drafter.v1 import drafter_pb2
from tandem.orchestrator.v1 import orchestrator_pb2
from tandem.target.v1 import target_pb2
from target_svc.settings import TargetSettings
from tests.support.cluster.containerfile import CONTAINERFILE
from tests.support.cluster.manifests import (
    KUBERNETES,
    SERVICES,
    VARIANTS,
    Manifests,
    base,
    known_variables,
    render,
    tool,
)
from tests.support.cluster.network_policy import selects

# The oldest that works (`preStop.sleep`), the one of `make kubernetes-check`, and one between.
VERSIONS = ("1.30", "1.33", "1.36")
# Time to stop the engine and to write the last spans, after preStop and drain.
STOP_SECONDS = 10
CUSTOM = {"PodMonitor", "PrometheusRule", "ScaledObject", "Issuer", "Certificate"}
GRPC_NAMES = {
    "drafter": drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"].full_name,
    "target": target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
    "orchestrator": orchestrator_pb2.DESCRIPTOR.services_by_name["OrchestratorService"].full_name,
}


def seconds(probe: dict[str, Any]) -> int:
    """How long a probe has to fail until it counts."""
    return int(probe["periodSeconds"] * probe["failureThreshold"])


def grpc_port(container: dict[str, Any]) -> dict[str, Any]:
    """The port that a service serves on."""
    (port,) = [one for one in container["ports"] if one["name"] in ("grpc", "public")]
    return dict(port)


@pytest.mark.parametrize("version", VERSIONS)
def test_documents_are_valid(manifests: Manifests, version: str) -> None:
    for document in manifests.documents:
        if document["kind"] not in CUSTOM:
            kubernetes_validate.validate(document, version, strict=True)


def test_an_overlay_has_what_is_needed(manifests: Manifests) -> None:
    sidecar = "sidecar" in manifests.name
    deployments = {"drafter", "target"} if sidecar else set(SERVICES)
    assert set(manifests.all("Deployment")) == deployments
    assert set(manifests.containers()) == set(SERVICES)
    assert set(manifests.all("Service")) == set(SERVICES)
    assert set(manifests.all("PodDisruptionBudget")) == deployments
    assert set(manifests.all("ServiceAccount")) == deployments
    assert len(manifests.all("ConfigMap")) == 4
    assert {document["apiVersion"] for document in manifests.documents} <= {
        "v1",
        "apps/v1",
        "policy/v1",
        "networking.k8s.io/v1",
        "autoscaling/v2",
        "cert-manager.io/v1",
        "keda.sh/v1alpha1",
        "monitoring.coreos.com/v1",
    }


def test_everything_is_in_the_namespace(manifests: Manifests) -> None:
    (name,) = manifests.all("Namespace")
    kustomization = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())
    assert name == kustomization["namespace"]
    labels = manifests.get("Namespace", name)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    if manifests.name != "base":
        for document in manifests.documents:
            if document["kind"] != "Namespace":
                assert document["metadata"]["namespace"] == name, document["metadata"]["name"]


@pytest.mark.parametrize("service", SERVICES)
def test_settings_are_ones_that_the_service_takes(
    manifests: Manifests, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its ConfigMap are its own and known, and the settings class takes their values."""
    _, container = manifests.containers()[service]
    own, telemetry = (source["configMapRef"]["name"] for source in container["envFrom"])
    assert own.partition("-")[0] == service
    assert telemetry.partition("-")[0] == "telemetry"
    names = set(manifests.get("ConfigMap", own)["data"])
    assert names
    assert names <= known_variables([service])
    assert all(name.startswith("OTEL_") for name in manifests.get("ConfigMap", telemetry)["data"])
    environment = manifests.environment(service)
    assert {name for name in environment if name.startswith("TANDEM_")} <= known_variables(
        [service]
    )
    manifests.settings(service, monkeypatch)


@pytest.mark.parametrize("service", SERVICES)
def test_ports_agree(manifests: Manifests, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, container = manifests.containers()[service]
    settings = manifests.settings(service, monkeypatch)
    port = grpc_port(container)
    assert settings.listen == f"0.0.0.0:{port['containerPort']}"
    (metrics,) = [one for one in container["ports"] if one["name"].endswith("metrics")]
    assert settings.metrics_listen == f"0.0.0.0:{metrics['containerPort']}"
    served = {one["name"]: one for one in manifests.get("Service", service)["spec"]["ports"]}
    assert served["grpc"]["port"] == port["containerPort"]
    assert served["grpc"]["targetPort"] == port["name"]
    if isinstance(settings, OrchestratorSettings):
        (http,) = [one for one in container["ports"] if one["name"].endswith("http")]
        assert settings.http_listen == f"0.0.0.0:{http['containerPort']}"
        assert served["http"]["port"] == http["containerPort"]
        assert served["http"]["targetPort"] == http["name"]
    else:
        assert set(served) == {"grpc"}
    assert f"ENV TANDEM_{service.upper()}_LISTEN={settings.listen}\n" in CONTAINERFILE
    everyones = [one for box in template["spec"]["containers"] for one in box["ports"]]
    for kind in ("name", "containerPort"):
        assert len({one[kind] for one in everyones}) == len(everyones)


def test_the_orchestrator_finds_its_peers(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = manifests.settings("orchestrator", monkeypatch)
    assert isinstance(settings, OrchestratorSettings)
    sidecar = "sidecar" in manifests.name
    for name, addresses in (("drafter", settings.drafters), ("target", settings.targets)):
        (port,) = manifests.get("Service", name)["spec"]["ports"]
        beside = sidecar and name == "target"
        host = "127.0.0.1" if beside else f"dns:///{name}"
        assert addresses == (f"{host}:{port['port']}",)


@pytest.mark.parametrize("service", SERVICES)
def test_selectors_select_their_pods_and_no_others(manifests: Manifests, service: str) -> None:
    template, _ = manifests.containers()[service]
    for kind in ("Service", "Deployment", "PodDisruptionBudget"):
        found = manifests.all(kind).get(service)
        if found is None:
            assert kind != "Service"
            continue
        selector = found["spec"]["selector"]
        selector = {"matchLabels": selector} if kind == "Service" else selector
        for other in manifests.templates().values():
            assert selects(selector, other["metadata"]["labels"]) == (other == template)
    service_spec = manifests.get("Service", service)["spec"]
    assert (service_spec.get("clusterIP") == "None") == (service != "orchestrator")
    assert not service_spec.get("publishNotReadyAddresses")


@pytest.mark.parametrize("service", SERVICES)
def test_probes_ask_for_the_right_thing(
    manifests: Manifests, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, container = manifests.containers()[service]
    port = grpc_port(container)["containerPort"]
    settings = manifests.settings(service, monkeypatch)
    assert (settings.admin_listen is not None) == ("tls" in manifests.name)
    if settings.admin_listen is not None:  # the kubelet has no certificate
        (admin,) = [
            one["containerPort"] for one in container["ports"] if one["name"].endswith("admin")
        ]
        assert settings.admin_listen == f"0.0.0.0:{admin}"
        port = admin
    ready = {"port": port, "service": GRPC_NAMES[service]}
    assert container["startupProbe"]["grpc"] == container["readinessProbe"]["grpc"] == ready
    assert container["livenessProbe"]["grpc"] == {"port": port}
    assert seconds(container["livenessProbe"]) >= 60
    assert seconds(container["readinessProbe"]) <= 10


def test_a_start_may_take_as_long_as_it_is_given(manifests: Manifests) -> None:
    patience = {
        service: seconds(container["startupProbe"])
        for service, (_, container) in manifests.containers().items()
    }
    # A pair is there when both models are loaded.
    assert patience["orchestrator"] >= max(patience["drafter"], patience["target"])
    for template, container in manifests.containers().values():
        on_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        assert seconds(container["startupProbe"]) >= (1800 if on_gpu else 600)
        (deployment,) = [
            one
            for one in manifests.all("Deployment").values()
            if one["spec"]["template"] is template
        ]
        spec = deployment["spec"]
        pause = spec["minReadySeconds"]
        assert spec["progressDeadlineSeconds"] > seconds(container["startupProbe"]) + pause


@pytest.mark.parametrize("service", SERVICES)
def test_a_drain_fits_its_limits(
    manifests: Manifests, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, container = manifests.containers()[service]
    drain = manifests.settings(service, monkeypatch).drain_seconds
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    # Until every node has taken the pod out of the Service.
    assert before >= 5
    grace = template["spec"]["terminationGracePeriodSeconds"]
    assert grace >= before + drain + STOP_SECONDS


def test_a_targets_text_is_waited_for_by_both(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    drains = {name: manifests.settings(name, monkeypatch).drain_seconds for name in SERVICES}
    assert drains["orchestrator"] == drains["target"]


def test_clients_come_back_but_their_texts_may_end_first(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = manifests.settings("orchestrator", monkeypatch)
    assert isinstance(settings, OrchestratorSettings)
    assert settings.connection_seconds >= 60
    assert settings.connection_grace_seconds > settings.drain_seconds
    assert settings.connection_grace_seconds >= 600


def test_a_sidecar_is_the_orchestrator() -> None:
    """But for what two services in one pod cannot share, and for how long it may wait."""
    path = KUBERNETES / "components" / "sidecar-orchestrator" / "target.yaml"
    (sidecar,) = yaml.safe_load(path.read_text())["spec"]["template"]["spec"]["containers"]
    _, own = base().containers()["orchestrator"]
    own["image"] = "orchestrator"
    own["ports"][0]["name"] = "public"
    own["ports"][1]["name"] = "public-http"
    own["ports"][2] = {"name": "public-metrics", "containerPort": 9466}
    own["env"] += [
        {"name": "TANDEM_ORCHESTRATOR_TARGETS", "value": "127.0.0.1:50052"},
        {"name": "TANDEM_ORCHESTRATOR_METRICS_LISTEN", "value": "0.0.0.0:9466"},
    ]
    own["startupProbe"] |= {"periodSeconds": 5, "failureThreshold": 360}
    assert sidecar == own


def test_every_component_is_rendered() -> None:
    """By one of the variants, or by an overlay itself."""
    components = {path.name for path in (KUBERNETES / "components").iterdir()}
    overlays = {path.name for path in (KUBERNETES / "overlays").iterdir()}
    assert overlays <= set(VARIANTS)
    used = {component for _, added in VARIANTS.values() for component in added}
    for overlay in overlays:
        text = (KUBERNETES / "overlays" / overlay / "kustomization.yaml").read_text()
        listed = [Path(one).name for one in yaml.safe_load(text)["components"]]
        assert listed[-1] == "images"
        used |= set(listed)
    assert used == components


def test_the_loader_may_write_what_the_services_read() -> None:
    folder = KUBERNETES / "loader"
    pod = yaml.safe_load((folder / "pod.yaml").read_text())
    for version in VERSIONS:
        kubernetes_validate.validate(pod, version, strict=True)
    (box,) = pod["spec"]["containers"]
    service, own = base().containers()["target"]
    assert box["securityContext"] == own["securityContext"]
    shared = service["spec"]["securityContext"]
    assert pod["spec"]["securityContext"] == shared | {"fsGroup": shared["runAsGroup"]}
    assert box["resources"]["requests"] == box["resources"]["limits"]
    (mount,) = box["volumeMounts"]
    assert mount == {"name": "models", "mountPath": "/models"}
    cache = KUBERNETES / "components" / "model-cache"
    claim = yaml.safe_load((cache / "volume.yaml").read_text())["metadata"]["name"]
    (volume,) = pod["spec"]["volumes"]
    assert volume["persistentVolumeClaim"] == {"claimName": claim}
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert kustomization["components"] == ["../components/images"]


def test_variables_in_manifests_are_settings() -> None:
    """Also those of overlays and components, where nothing renders them."""
    used = {
        name
        for path in KUBERNETES.rglob("*")
        if path.suffix in (".yaml", ".env")
        for name in re.findall(r"\bTANDEM_[A-Z_]+", path.read_text())
    }
    assert used
    assert used <= known_variables()


@pytest.mark.skipif(
    tool("kustomize") is None,
    reason="kustomize is not installed; `make kubernetes-check` builds it and renders the overlays",
)
def test_on_a_single_gpu_the_target_drafts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No drafter is waited for."""
    rendered = render("single-gpu", tmp_path)
    target = rendered.settings("target", monkeypatch)
    assert isinstance(target, TargetSettings)
    assert target.drafts == "lookup"
    orchestrator = rendered.settings("orchestrator", monkeypatch)
    assert isinstance(orchestrator, OrchestratorSettings)
    assert orchestrator.draft_by == "target"
    assert rendered.get("Deployment", "drafter")["spec"]["replicas"] == 0
