"""Which pods may talk to which, what monitoring is told to scrape, and what follows from that."""

from __future__ import annotations

import re

import pytest
import yaml

from tandem.telemetry.metrics.catalog import METRICS
from tandem.telemetry.tracing.export import make_writer
from tests.support.cluster.endpoints import endpoints
from tests.support.cluster.manifests import (
    KUBERNETES,
    SERVICES,
    Manifests,
)
from tests.support.cluster.network_policy import Edge, allowed_edges, selects


def test_network_policies_close_what_they_should(manifests: Manifests) -> None:
    sidecar, telemetry = "sidecar" in manifests.name, "otel" in manifests.name
    public = "target" if sidecar else "orchestrator"
    ports = ("public", "public-http") if sidecar else ("grpc", "http")
    expected: set[Edge] = {
        *((client, public, port) for client in ("client", "job") for port in ports),
        (public, "drafter", "grpc"),
        ("monitoring", "drafter", "metrics"),
        ("monitoring", "target", "metrics"),
        *((one, "dns", name) for one in (public, "job") for name in ("dns", "dns_tcp")),
    }
    if sidecar:
        expected.add(("monitoring", "target", "public-metrics"))
    else:
        expected |= {
            ("orchestrator", "target", "grpc"),
            ("monitoring", "orchestrator", "metrics"),
        }
    if telemetry:
        for name in manifests.templates():
            expected |= {
                (name, "monitoring", "otlp"),
                (name, "dns", "dns"),
                (name, "dns", "dns_tcp"),
            }
    policies, ends = manifests.policies(), endpoints(manifests)
    inside = {end.name for end in ends if end.namespace == "tandem"}
    allowed = allowed_edges(policies, ends)
    assert {edge for edge in allowed if inside & set(edge[:2])} == expected
    # Within the namespace each end by itself allows this and no more.
    between = {edge for edge in expected if inside.issuperset(edge[:2])}
    for side in ("Ingress", "Egress"):
        alone = allowed_edges(policies, ends, [side])
        assert {edge for edge in alone if inside.issuperset(edge[:2])} == between
    # The model itself: without policies everybody reaches everything.
    assert len(allowed_edges([], ends)) == len(ends) * sum(len(end.ports) for end in ends)


def test_telemetry_goes_where_the_policy_lets_it(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for service in SERVICES:
        variables = {
            name: value
            for name, value in manifests.environment(service).items()
            if name.startswith("OTEL_") and name != "OTEL_RESOURCE_ATTRIBUTES"
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        writer = make_writer(service, None)
        assert (writer is not None) == ("otel" in manifests.name)
        if writer is not None:
            writer.close()
            address = variables["OTEL_EXPORTER_OTLP_ENDPOINT"]
            assert re.fullmatch(r"http://[\w-]+\.monitoring:4317", address)


CAPACITIES = {
    "tandem_sequences_open": "max_sequences",
    "tandem_requests_active": "max_requests",
}


def triggers(manifests: Manifests) -> dict[str, dict[str, int]]:
    """Of each autoscaled Deployment: metric and threshold a replica."""
    found: dict[str, dict[str, int]] = {}
    for name, scaler in manifests.all("HorizontalPodAutoscaler").items():
        found[name] = {
            one["pods"]["metric"]["name"]: int(one["pods"]["target"]["averageValue"])
            for one in scaler["spec"]["metrics"]
        }
    for name, scaler in manifests.all("ScaledObject").items():
        found[name] = {}
        for one in scaler["spec"]["triggers"]:
            query = re.fullmatch(
                r'sum\((\w+)\{namespace="tandem"(?:, role="(\w+)")?\}\)', one["metadata"]["query"]
            )
            assert query is not None
            metric, role = query.groups()
            (known,) = [known for known in METRICS if known.prometheus_name == metric]
            assert role == (name if "role" in known.labels else None)
            found[name][metric] = int(one["metadata"]["threshold"])
    return found


def test_autoscaling_follows_what_the_services_measure(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    scalers = triggers(manifests)
    if not re.search("hpa|keda", manifests.name):
        assert not scalers
        return
    assert set(scalers) == set(manifests.all("Deployment"))
    served = {metric.prometheus_name: metric.roles for metric in METRICS}
    for name, thresholds in scalers.items():
        # An apply must not set back what the autoscaler chose.
        assert "replicas" not in manifests.get("Deployment", name)["spec"]
        assert all(name in served[metric] for metric in thresholds)
        (load,) = set(thresholds) - {"tandem_queue_depth"}
        capacity = getattr(manifests.settings(name, monkeypatch), CAPACITIES[load])
        assert thresholds[load] == 0.75 * capacity
        assert thresholds["tandem_queue_depth"] >= 1
    kinds = {**manifests.all("HorizontalPodAutoscaler"), **manifests.all("ScaledObject")}
    for name, scaler in kinds.items():
        assert scaler["spec"]["scaleTargetRef"]["name"] == name
        behavior = scaler["spec"].get("behavior")
        if behavior is None:
            behavior = scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 300


def test_what_prometheus_scrapes_is_there(manifests: Manifests) -> None:
    monitors = manifests.all("PodMonitor")
    assert bool(monitors) == ("monitoring" in manifests.name)
    for monitor in monitors.values():
        scraped = {one["port"] for one in monitor["spec"]["podMetricsEndpoints"]}
        for template in manifests.templates().values():
            assert selects(monitor["spec"]["selector"], template["metadata"]["labels"])
            for box in template["spec"]["containers"]:
                assert len({port["name"] for port in box["ports"]} & scraped) == 1


def test_alerts_are_those_of_the_observability_folder() -> None:
    rules = yaml.safe_load((KUBERNETES / "components" / "monitoring" / "rules.yaml").read_text())
    source = yaml.safe_load((KUBERNETES.parent / "observability" / "rules.yml").read_text())
    assert rules["spec"] == source
