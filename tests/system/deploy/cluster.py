"""A cluster with an overlay in it: its pods, and its nodes, which KWOK simulates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.control_plane import ControlPlane
from tests.support.cluster.manifests import (
    Document,
    Manifests,
)

BUILT_BY = "is not installed; `make kubernetes-check` builds it"

NAMESPACE = "tandem"
ZONE = "topology.kubernetes.io/zone"
TIMEOUT = "--timeout=60s"


def node(name: str, zone: str, **capacity: str) -> Document:
    """A node, which KWOK keeps alive; one with a GPU has the label and the taint for it."""
    gpu = {"nvidia.com/gpu": capacity["gpu"]} if "gpu" in capacity else {}
    resources = {"cpu": "32", "memory": "256Gi", "pods": "50", **gpu}
    labels = {"kubernetes.io/hostname": name, ZONE: zone, "tandem-tier": name.partition("-")[0]}
    if gpu:
        labels["nvidia.com/gpu.present"] = "true"
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": labels,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "spec": {"taints": [taint] if gpu else []},
        "status": {"capacity": resources, "allocatable": resources},
    }


# Three zones; as many GPUs as `two-tier` needs, but for a small one in the zone without a target.
NODES = [
    node("cpu-a", "a"),
    node("cpu-b", "b"),
    node("large-a", "a", gpu="1"),
    node("large-b", "b", gpu="1"),
    node("small-a", "a", gpu="1"),
    node("small-b", "b", gpu="1"),
    node("small-c", "c", gpu="1"),
    # For `large-target`.
    node("multi-a", "a", gpu="4"),
    node("multi-b", "b", gpu="4"),
]
# What `components/model-cache` claims.
VOLUME: Document = {
    "apiVersion": "v1",
    "kind": "PersistentVolume",
    "metadata": {"name": "models"},
    "spec": {
        "capacity": {"storage": "200Gi"},
        "accessModes": ["ReadWriteMany"],
        "persistentVolumeReclaimPolicy": "Retain",
        "nfs": {"server": "192.0.2.1", "path": "/models"},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("overlays")


@dataclass(frozen=True)
class Cluster:
    """A control plane with a variant in it.

    Attributes:
        variant: its name.
        manifests: what was applied.
        path: where from, as an argument of kubectl.
        plane: that has it.
    """

    variant: str
    manifests: Manifests
    path: str
    plane: ControlPlane

    def settled(self) -> bool:
        """Whether all replicas are available that Deployments, or their autoscalers, want."""
        scalers = self.manifests.all("HorizontalPodAutoscaler")
        for name in self.manifests.all("Deployment"):
            found = deployment(self.plane, name)
            wanted = found["spec"]["replicas"]
            least = scalers[name]["spec"]["minReplicas"] if name in scalers else wanted
            status = found["status"]
            current = status.get("observedGeneration") == found["metadata"]["generation"]
            counts = {status.get(f"{one}eplicas", 0) for one in ("r", "availableR", "updatedR")}
            if not (current and wanted >= least and counts == {wanted}):
                return False
        return True


def pods(plane: ControlPlane, name: str) -> list[Document]:
    """The pods of a service that are not on their way out."""
    selector = f"--selector=app.kubernetes.io/name={name}"
    found = plane.get("pods", "--namespace", NAMESPACE, selector)
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def is_ready(pod: Document) -> bool:
    conditions = pod["status"].get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def deployment(plane: ControlPlane, name: str) -> Any:
    return plane.get("deployment", name, "--namespace", NAMESPACE)
