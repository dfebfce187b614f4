"""What pods may do, what they hold, and where they run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.settings import ModelSettings
from tests.support.cluster.containerfile import CONTAINERFILE
from tests.support.cluster.manifests import (
    SERVICES,
    Manifests,
    images,
    known_variables,
)
from tests.support.cluster.network_policy import selects


@pytest.mark.parametrize("service", SERVICES)
def test_pods_are_confined(manifests: Manifests, service: str) -> None:
    template, container = manifests.containers()[service]
    spec = template["spec"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    user = {"runAsUser": 65532, "runAsGroup": 65532}
    profile = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert spec["securityContext"] == user | profile
    assert "USER 65532:65532\n" in CONTAINERFILE
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    account = manifests.get("ServiceAccount", spec["serviceAccountName"])
    assert account["automountServiceAccountToken"] is False
    for volume in spec["volumes"]:
        (kind,) = set(volume) - {"name"}
        assert kind in ("emptyDir", "persistentVolumeClaim", "secret")
        if kind == "secret":
            assert volume[kind]["defaultMode"] == 0o444
            continue
        assert "sizeLimit" in volume[kind] or volume[kind]["readOnly"]


def test_volumes_are_mounted_and_there(manifests: Manifests) -> None:
    for template in manifests.templates().values():
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        mounts = [mount for box in template["spec"]["containers"] for mount in box["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == volumes
        for volume in template["spec"]["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in manifests.all("PersistentVolumeClaim")
                assert all(one["readOnly"] for one in mounts if one["name"] == volume["name"])


@pytest.mark.parametrize("service", SERVICES)
def test_images_are_pinned(manifests: Manifests, service: str) -> None:
    _, container = manifests.containers()[service]
    assert re.fullmatch(r"\S+(:\d+\.\d+\.\d+|@sha256:[0-9a-f]{64})", container["image"])
    by_vllm = service == "target" and "large-target" in manifests.name
    assert container["image"] == images()["target-vllm" if by_vllm else service]
    assert "imagePullPolicy" not in container


@pytest.mark.parametrize("service", SERVICES)
def test_resources_are_limits(manifests: Manifests, service: str) -> None:
    _, container = manifests.containers()[service]
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    assert {"cpu", "memory"} <= set(resources["limits"])


@pytest.mark.parametrize("service", ["drafter", "target"])
def test_a_model_has_its_device_and_threads(
    manifests: Manifests, service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, container = manifests.containers()[service]
    settings = manifests.settings(service, monkeypatch)
    assert isinstance(settings, ModelSettings)
    limits = container["resources"]["limits"]
    assert settings.threads == int(limits["cpu"])
    spec = template["spec"]
    on_gpu = "nvidia.com/gpu" in limits
    assert on_gpu == (settings.device == "cuda") == ("nodeSelector" in spec)
    assert on_gpu == any(one["key"] == "nvidia.com/gpu" for one in spec.get("tolerations", ()))
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert on_gpu == ("/dev/shm" in mounts)
    # A surge deadlocks without a spare GPU.
    rolling = manifests.get("Deployment", service)["spec"]["strategy"]["rollingUpdate"]
    assert rolling == (
        {"maxSurge": 0, "maxUnavailable": 1} if on_gpu else {"maxSurge": 1, "maxUnavailable": 0}
    )
    if getattr(settings, "method", "model") == "model":
        folder = Path(settings.model)
        assert str(folder.parent) == ("/models" if on_gpu else "/app/models")
        assert on_gpu == ("/models" in mounts)
    else:
        assert "/models" not in mounts


@pytest.mark.parametrize("service", ["drafter", "target"])
def test_a_model_says_where_it_runs(manifests: Manifests, service: str) -> None:
    """So that orchestrators prefer drafters of their target's zone."""
    _, container = manifests.containers()[service]
    variable = f"TANDEM_{service.upper()}_ZONE"
    assert variable in known_variables([service])
    (entry,) = [one for one in container["env"] if one["name"] == variable]
    path = entry["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['topology.kubernetes.io/zone']"


def test_drafters_are_near_their_target(manifests: Manifests) -> None:
    preferred = manifests.templates()["drafter"]["spec"]["affinity"]["podAffinity"]
    (only,) = preferred["preferredDuringSchedulingIgnoredDuringExecution"]
    term = only["podAffinityTerm"]
    assert term["topologyKey"] == "topology.kubernetes.io/zone"
    assert selects(term["labelSelector"], manifests.templates()["target"]["metadata"]["labels"])
    for template in manifests.templates().values():
        spread = template["spec"]["topologySpreadConstraints"]
        keys = {one["topologyKey"] for one in spread}
        assert keys == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
        for one in spread:
            assert one["whenUnsatisfiable"] == "ScheduleAnyway"
            assert selects(one["labelSelector"], template["metadata"]["labels"])


def test_a_budget_keeps_replicas_and_lets_nodes_go(manifests: Manifests) -> None:
    for budget in manifests.all("PodDisruptionBudget").values():
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
