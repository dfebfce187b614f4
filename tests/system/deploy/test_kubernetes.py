"""Overlays against a real API server with nodes that KWOK simulates."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.support.cluster.control_plane import ControlPlane, control_plane, missing, wait
from tests.support.cluster.manifests import (
    KUBERNETES,
    VARIANTS,
    Document,
    Manifests,
    overlay_folder,
    render,
    render_text,
)
from tests.system.deploy.cluster import (
    BUILT_BY,
    NAMESPACE,
    NODES,
    TIMEOUT,
    VOLUME,
    ZONE,
    Cluster,
    deployment,
    folder,
    is_ready,
    pods,
)

pytestmark = pytest.mark.campaign(
    "overlays on a real API server",
    "unit/deploy: their manifests",
)

__all__ = ["folder"]  # a fixture of both files of overlays

needs_control_plane = pytest.mark.skipif(
    bool(missing()), reason=f"{', '.join(missing())}: {BUILT_BY}"
)
# A pod that can be placed is ready within two.
STUCK_SECONDS = 10


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with control_plane(tmp_path_factory.mktemp("control-plane")) as plane:
        plane.create(*NODES)
        plane.kubectl("wait", "--for=condition=Ready", TIMEOUT, "node", "--all")
        yield plane


@pytest.fixture(params=VARIANTS, scope="module")
def cluster(request: pytest.FixtureRequest, plane: ControlPlane, folder: Path) -> Iterator[Cluster]:
    """Each variant once, for all tests that look at it: settled at first, removed at last."""
    manifests = render(request.param, folder)
    path = f"--kustomize={overlay_folder(request.param, folder)}"
    plane.create(VOLUME)
    try:
        plane.kubectl("apply", "--server-side", path)
        cluster = Cluster(request.param, manifests, path, plane)
        wait(f"{request.param} is settled", cluster.settled, 90)
        yield cluster
    finally:
        plane.kubectl("uncordon", *(one["metadata"]["name"] for one in NODES))
        # With pods in it a namespace waits for half of their grace period until it looks again.
        within = ("--namespace", NAMESPACE)
        plane.kubectl("delete", "hpa", *within, "--all")
        plane.kubectl("scale", "deployment", *within, "--all", "--replicas=0")
        plane.kubectl("wait", "--for=delete", *within, TIMEOUT, "pod", "--all")
        plane.kubectl("delete", "namespace", NAMESPACE, TIMEOUT)
        plane.kubectl("delete", "persistentvolume", "models", TIMEOUT)


def only(variant: str) -> pytest.MarkDecorator:
    """The cluster has this variant."""
    return pytest.mark.parametrize("cluster", [variant], indirect=True)


@needs_control_plane
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rehearsal_finds_nothing(variant: str, plane: ControlPlane, folder: Path) -> None:
    """The server takes all of it, without a warning, in a namespace of another name."""
    rendered = render_text(variant, folder).replace("namespace: tandem\n", "namespace: rehearsal\n")
    name = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "rehearsal"}}
    plane.kubectl("apply", "--filename=-", given=yaml.safe_dump(name))
    rehearse = ("apply", "--server-side", "--dry-run=server", "--filename=-")
    answer = plane.kubectl(*rehearse, given=rendered, check=False)
    assert (answer.code, answer.errors) == (0, "")
    assert len(answer.output.splitlines()) == len(render(variant, folder).documents)


@needs_control_plane
def test_an_overlay_is_taken_and_its_pods_run(cluster: Cluster) -> None:
    plane, manifests = cluster.plane, cluster.manifests
    # Applying it once more would change nothing, whatever controllers have written since.
    difference = plane.kubectl("diff", "--server-side", cluster.path, check=False)
    assert (difference.code, difference.output) == (0, "")
    for name in manifests.all("Deployment"):
        running = pods(plane, name)
        assert len(running) == deployment(plane, name)["spec"]["replicas"]
        assert all(is_ready(pod) for pod in running)
        for pod in running:
            check_place(pod)
    for name in manifests.all("PersistentVolumeClaim"):
        claim = plane.get("pvc", name, "--namespace", NAMESPACE)
        assert claim["status"]["phase"] == "Bound"
    for name in manifests.all("HorizontalPodAutoscaler"):
        wait(f"the autoscaler of {name} finds it", partial(scales, plane, name), 40)
    check_endpoints(plane, manifests)


def check_place(pod: Document) -> None:
    """A pod with a GPU is on a node of its tier, one a node; others are where none is."""
    tier = pod["spec"]["nodeName"].partition("-")[0]
    limits = [box["resources"]["limits"] for box in pod["spec"]["containers"]]
    on_gpu = any("nvidia.com/gpu" in one for one in limits)
    assert on_gpu == (tier != "cpu")
    wanted = pod["spec"].get("nodeSelector", {}).get("tandem-tier", tier)
    assert tier == wanted
    assert pod["status"]["qosClass"] == "Guaranteed"


def scales(plane: ControlPlane, name: str) -> bool:
    status = plane.get("hpa", name, "--namespace", NAMESPACE)["status"]
    conditions = {one["type"]: one["status"] for one in status.get("conditions", ())}
    return conditions.get("AbleToScale") == "True"


def check_endpoints(plane: ControlPlane, manifests: Manifests) -> None:
    """Each Service leads to all pods that it should, by its ports."""
    for name, service in manifests.all("Service").items():
        selector = f"--selector=kubernetes.io/service-name={name}"
        slices = plane.get("endpointslices", "--namespace", NAMESPACE, selector)
        # Of a Deployment without replicas there are neither.
        found = [one for each in slices for one in each["endpoints"] or ()]
        ports = {port["port"] for each in slices for port in each["ports"] or ()}
        pod_name = service["spec"]["selector"]["app.kubernetes.io/name"]
        running = {pod["metadata"]["name"] for pod in pods(plane, pod_name)}
        assert len(running) == deployment(plane, pod_name)["spec"]["replicas"]
        ready = {one["targetRef"]["name"] for one in found if one["conditions"]["ready"]}
        assert ready == running
        assert ports == ({one["port"] for one in service["spec"]["ports"]} if running else set())


@needs_control_plane
@only("two-tier")
def test_other_pods_are_refused(cluster: Cluster) -> None:
    """By the namespace's level. The loader is admitted, as the services are."""
    rehearse = ("create", "--dry-run=server", "--namespace", NAMESPACE, "--filename=-")
    loader = yaml.safe_load((KUBERNETES / "loader" / "pod.yaml").read_text())
    cluster.plane.kubectl(*rehearse, given=yaml.safe_dump(loader))
    del loader["spec"]["securityContext"]["seccompProfile"]
    refused = cluster.plane.kubectl(*rehearse, given=yaml.safe_dump(loader), check=False)
    assert refused.code != 0
    assert 'violates PodSecurity "restricted' in refused.errors


@needs_control_plane
@only("two-tier")
def test_a_drain_respects_the_budget(cluster: Cluster) -> None:
    """The first node goes; the second has to wait, since no GPU is left for the first one's pod."""
    plane = cluster.plane
    drain = ("drain", "--ignore-daemonsets", "--delete-emptydir-data")
    plane.kubectl(*drain, TIMEOUT, "large-a")
    wait("one target waits for a GPU", lambda: len(pods(plane, "target")) == 2, 20)
    (pending,) = [pod for pod in pods(plane, "target") if not is_ready(pod)]
    assert pending["status"]["phase"] == "Pending"
    refused = plane.kubectl(*drain, "--timeout=5s", "large-b", check=False)
    assert refused.code != 0
    assert "would violate the pod's disruption budget" in refused.errors
    (ready,) = [pod for pod in pods(plane, "target") if is_ready(pod)]
    assert ready["spec"]["nodeName"] == "large-b"
    # With the first node back both targets run, and the second may go.
    plane.kubectl("uncordon", "large-a")
    wait("the budget has room", lambda: allowed_disruptions(plane, "target") == 1, 60)
    plane.kubectl(*drain, TIMEOUT, "large-b")
    plane.kubectl("uncordon", "large-b")
    wait("all is as it was", cluster.settled, 60)


def allowed_disruptions(plane: ControlPlane, name: str) -> int:
    budget = plane.get("pdb", name, "--namespace", NAMESPACE)
    return int(budget["status"]["disruptionsAllowed"])


class Watch:
    """How few replicas of a Deployment were available, while it ran."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self.fewest = 1 << 30
        self.looks = 0
        self._plane = plane
        self._name = name
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.is_set():
            available = deployment(self._plane, self._name)["status"].get("availableReplicas", 0)
            self.fewest = min(self.fewest, available)
            self.looks += 1
            time.sleep(0.05)


@needs_control_plane
@only("cpu-demo")
def test_a_rollout_on_cpus_keeps_all_replicas(cluster: Cluster) -> None:
    assert roll_out(cluster) == {"drafter": 1, "target": 1, "orchestrator": 1}


@needs_control_plane
@only("two-tier")
def test_a_rollout_on_gpus_takes_one_at_a_time(cluster: Cluster) -> None:
    assert roll_out(cluster) == {"drafter": 1, "target": 1, "orchestrator": 2}


def roll_out(cluster: Cluster) -> dict[str, int]:
    """Replace all pods, and return the fewest available ones meanwhile, by Deployment."""
    before = uids(cluster)
    watches = {name: Watch(cluster.plane, name) for name in cluster.manifests.all("Deployment")}
    with ExitStack() as watching:
        for watch in watches.values():
            watching.enter_context(watch)
        for name in watches:
            begin(cluster, name)
        wait("all is replaced", cluster.settled, 100)
    assert not before & uids(cluster)
    assert all(watch.looks >= 10 for watch in watches.values())
    return {name: watch.fewest for name, watch in watches.items()}


def uids(cluster: Cluster) -> set[str]:
    """Of all pods."""
    names = cluster.manifests.all("Deployment")
    return {pod["metadata"]["uid"] for name in names for pod in pods(cluster.plane, name)}


def begin(cluster: Cluster, name: str) -> None:
    cluster.plane.kubectl("rollout", "restart", f"deployment/{name}", "--namespace", NAMESPACE)


@needs_control_plane
@only("single-gpu")
def test_a_surge_would_wait_for_ever_for_a_gpu(cluster: Cluster) -> None:
    """Why the GPU components say maxSurge 0: with the base's strategy a rollout gets nowhere."""
    plane = cluster.plane
    (running,) = pods(plane, "target")
    names = {one["metadata"]["name"] for one in NODES} - {running["spec"]["nodeName"]}
    plane.kubectl("cordon", *names)
    patch = ("patch", "deployment", "target", "--namespace", NAMESPACE, "--patch")
    plane.kubectl(*patch, strategy(surge=1, unavailable=0))
    begin(cluster, "target")
    wait("a second pod is wanted", lambda: len(pods(plane, "target")) == 2, 30)
    time.sleep(STUCK_SECONDS)
    assert sum(is_ready(pod) for pod in pods(plane, "target")) == 1
    plane.kubectl(*patch, strategy(surge=0, unavailable=1))
    wait("the rollout is over", cluster.settled, 60)
    (replaced,) = pods(plane, "target")
    assert replaced["metadata"]["uid"] != running["metadata"]["uid"]


def strategy(surge: int, unavailable: int) -> str:
    """A patch of a Deployment."""
    rolling = {"maxSurge": surge, "maxUnavailable": unavailable}
    return json.dumps({"spec": {"strategy": {"rollingUpdate": rolling}}})


@needs_control_plane
@only("two-tier")
def test_drafters_come_to_their_targets_zone(cluster: Cluster) -> None:
    """There is a small GPU in zone c too, and no target."""
    zones = {one["metadata"]["name"]: one["metadata"]["labels"][ZONE] for one in NODES}
    targets = {zones[pod["spec"]["nodeName"]] for pod in pods(cluster.plane, "target")}
    assert targets == {"a", "b"}
    # Those that were there before any target may be anywhere; new ones are not.
    begin(cluster, "drafter")
    wait("the drafters have been replaced", cluster.settled, 100)
    drafters = pods(cluster.plane, "drafter")
    assert {zones[pod["spec"]["nodeName"]] for pod in drafters} <= targets
    # What TANDEM_DRAFTER_ZONE is read from: the cluster gives each pod its node's label.
    for pod in drafters:
        assert pod["metadata"]["labels"][ZONE] == zones[pod["spec"]["nodeName"]]
