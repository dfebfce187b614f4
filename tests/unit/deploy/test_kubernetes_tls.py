"""The component `tls`: which certificates pods present and trust, and where plaintext remains."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.settings import OrchestratorSettings
from tandem.rpc.security.plaintext import host_of
from tests.support.cluster.manifests import (
    SERVICES,
    VARIANTS,
    Manifests,
    base,
    overlay_folder,
    render,
    tool,
)

# What cert-manager writes into a Secret.
_KEYS = {"tls.crt", "tls.key", "ca.crt"}


@pytest.fixture(params=[name for name in VARIANTS if "tls" in name])
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    if tool("kustomize") is None:
        pytest.skip("kustomize is not installed; `make kubernetes-check` builds it")
    return render(request.param, tmp_path_factory.mktemp("tls"))


def certificates(manifests: Manifests) -> dict[str, Any]:
    return {
        name: one["spec"]
        for name, one in manifests.all("Certificate").items()
        if name in (*SERVICES, "client")
    }


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_has_its_own_certificate(
    secured: Manifests, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, container = secured.containers()[service]
    settings = secured.settings(service, monkeypatch)
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == "/tls"]
    assert mount["readOnly"]
    (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == mount["name"]]
    assert volume["secret"]["secretName"] == certificates(secured)[service]["secretName"]
    files = [settings.tls_cert, settings.tls_key, settings.tls_client_ca]
    if isinstance(settings, OrchestratorSettings):
        files += [settings.peer_cert, settings.peer_key, settings.peer_ca]
    for file in files:
        assert file is not None
        assert file.parent == Path(mount["mountPath"])
        assert file.name in _KEYS


@pytest.mark.parametrize("service", SERVICES)
def test_no_plaintext_is_asked_for(
    secured: Manifests, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is where this component is not."""
    assert secured.settings(service, monkeypatch).plaintext == "loopback"
    plain = base().settings(service, monkeypatch)
    assert plain.plaintext == "allow"
    if isinstance(plain, OrchestratorSettings):
        assert plain.peer_plaintext == "allow"
        settings = secured.settings(service, monkeypatch)
        assert isinstance(settings, OrchestratorSettings)
        assert settings.peer_plaintext == "loopback"


def test_names_fit(secured: Manifests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of peers are what the orchestrator finds them by; who may call is who does."""
    found, names = certificates(secured), {}
    for name, spec in found.items():
        names[name] = set(spec["dnsNames"])
    settings = secured.settings("orchestrator", monkeypatch)
    assert isinstance(settings, OrchestratorSettings)
    for service, addresses, asked in (
        ("drafter", settings.drafters, settings.drafter_tls_name),
        ("target", settings.targets, settings.target_tls_name),
    ):
        asked_for = {asked} if asked else {host_of(address) for address in addresses}
        assert asked_for <= names[service]
        callers = set(secured.settings(service, monkeypatch).tls_clients)
        assert callers <= names["orchestrator"]
        assert not any(callers & names[other] for other in ("drafter", "target", "client"))
        assert found[service]["usages"] == ["server auth"]
    callers = set(secured.settings("orchestrator", monkeypatch).tls_clients)
    assert callers <= names["client"]
    assert not any(callers & names[other] for other in SERVICES)
    assert found["orchestrator"]["usages"] == ["server auth", "client auth"]


def test_containers_of_a_pod_do_not_take_each_others_ports(
    secured: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And probes ask where a container answers without a certificate."""
    taken: dict[str, list[str]] = {}
    for service, (template, container) in secured.containers().items():
        settings = secured.settings(service, monkeypatch)
        assert settings.admin_listen is not None
        assert settings.metrics_listen is not None
        addresses = [settings.listen, settings.admin_listen, settings.metrics_listen]
        if isinstance(settings, OrchestratorSettings):
            assert settings.http_listen is not None
            addresses.append(settings.http_listen)
        ports = [address.rpartition(":")[2] for address in addresses]
        taken.setdefault(template["metadata"]["labels"]["app.kubernetes.io/name"], []).extend(ports)
        declared = {str(one["containerPort"]) for one in container["ports"]}
        assert declared == set(ports)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert str(container[probe]["grpc"]["port"]) == ports[1]
    for ports in taken.values():
        assert len(set(ports)) == len(ports)


def test_tls_before_the_sidecar_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orchestrator would have no certificate, and its probes no answer."""
    program = tool("kustomize")
    if program is None:
        pytest.skip("kustomize is not installed; `make kubernetes-check` builds it")
    wrong = "two-tier, tls, sidecar"
    monkeypatch.setitem(VARIANTS, wrong, ("two-tier", ("tls", "sidecar-orchestrator")))
    folder = str(overlay_folder(wrong, tmp_path))
    built = subprocess.run([program, "build", folder], capture_output=True, text=True, timeout=60)
    assert built.returncode != 0
    assert "components/sidecar-orchestrator" in built.stderr
    assert "readinessProbe/grpc/port failed: test failed" in built.stderr


def test_one_authority_signs_all(secured: Manifests) -> None:
    (authority,) = [one for one in secured.all("Certificate").values() if one["spec"].get("isCA")]
    (issuer,) = [one for one in secured.all("Issuer").values() if "ca" in one["spec"]]
    assert issuer["spec"]["ca"]["secretName"] == authority["spec"]["secretName"]
    for spec in certificates(secured).values():
        assert spec["issuerRef"] == {"name": issuer["metadata"]["name"], "kind": "Issuer"}
        assert spec["privateKey"]["algorithm"] == "ECDSA", "what gRPC takes, beside RSA"
        assert spec["privateKey"]["rotationPolicy"] == "Always"
    mounted = {
        volume["secret"]["secretName"]
        for template in secured.templates().values()
        for volume in template["spec"]["volumes"]
        if "secret" in volume
    }
    assert authority["spec"]["secretName"] not in mounted
