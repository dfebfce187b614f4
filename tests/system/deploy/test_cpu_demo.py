"""The overlay `cpu-demo` as processes: its environment, its names, and its NetworkPolicies' edges.

Each pod is a process in a network namespace, with a root file system like its image's and only the
environment variables of its image and its container.
"""

from __future__ import annotations

import http.client
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.containerfile import image
from tests.support.cluster.control_plane import wait
from tests.support.cluster.manifests import SERVICES, base, render, tool
from tests.support.cluster.pods import Pods
from tests.support.processes.network_namespaces import obstacle

pytestmark = pytest.mark.campaign(
    "the overlay `cpu-demo` in network namespaces",
    "unit/deploy: its manifests and NetworkPolicies",
)

NEW_TOKENS = 48
# The orchestrator looks again after two seconds at most, and prefers others for five.
RETURN_SECONDS = 30

needs_kustomize = pytest.mark.skipif(
    tool("kustomize") is None,
    reason="kustomize is not installed; `make kubernetes-check` builds it and renders the overlay",
)


@pytest.fixture(
    params=["base", pytest.param("cpu-demo", marks=needs_kustomize)],
    scope="module",
)
def pods(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pods]:
    """The services are ready, and the policies hold."""
    reason = obstacle()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("pods")
    manifests = base() if request.param == "base" else render(request.param, folder)
    with ExitStack() as resources:
        pods = Pods(manifests, folder, resources)
        pods.start()
        yield pods


def complete(pods: Pods) -> dict[str, Any]:
    """A text that the client asks for, from where it is."""
    said = pods.namespaces["client"].run(
        *(sys.executable, "-m", "tandem.tools.cli", "generate", "--json"),
        *("--address", "orchestrator.tandem:50050", "--seed", "1", "--timeout", "50"),
        *("--gamma", "4"),  # whatever drafts earn on a machine as busy as this
        *("--max-new-tokens", str(NEW_TOKENS), "--ignore-eos", "import "),
    )
    reply: dict[str, Any] = json.loads(said)
    assert len(reply["token_ids"]) == NEW_TOKENS
    assert reply["text"]
    return reply


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_exactly_its_environment(pods: Pods, service: str) -> None:
    text = Path(f"/proc/{pods.processes[service].pid}/environ").read_text()
    found = dict(one.split("=", 1) for one in text.rstrip("\0").split("\0"))
    rendered, own = pods.container_environment(service), image(service).environment
    assert {name: found.get(name) for name in rendered} == rendered
    assert found["OTEL_RESOURCE_ATTRIBUTES"] == f"service.instance.id={service}-0"
    # glibc cuts its own variable to pieces where it lies.
    others = {name for name in found if "glibc" not in name.lower()} - set(rendered)
    assert {name: found[name] for name in others} == {
        name: own[name] for name in set(own) - set(rendered) - {"GLIBC_TUNABLES"}
    }


def test_a_client_gets_a_text_that_was_drafted(pods: Pods) -> None:
    summary = complete(pods)["summary"]
    assert not summary["drafter_lost"]
    assert summary["accepted_tokens"] > 0
    assert summary["rounds"] < summary["new_tokens"] == NEW_TOKENS


def test_nobody_reaches_more_than_the_policies_allow(pods: Pods) -> None:
    reached = pods.reached()
    assert reached == pods.edges

    def sources(service: str, port: str) -> set[str]:
        return {edge[0] for edge in reached if edge[1:] == (service, port)}

    # Whatever the policies' rules are taken to be.
    assert sources("drafter", "grpc") == sources("target", "grpc") == {"orchestrator"}
    assert sources("orchestrator", "grpc") == {"client", "job"}
    for service in SERVICES:
        assert sources(service, "metrics") == {"monitoring"}
        assert not sources(service, "other")
    assert not {edge for edge in reached if edge[0] in ("drafter", "target")}
    # The test itself: where nothing filters, everybody reaches everything.
    with pods.allowing_all():
        assert pods.reached() == set(pods.pairs)


@pytest.mark.parametrize("pods", ["base"], indirect=True)
def test_without_its_drafter_an_orchestrator_serves_plain_texts(pods: Pods) -> None:
    """A policy that cuts the two off from each other, while they are connected."""
    cut = ("orchestrator", "drafter", "grpc")
    lost = lost_drafters(pods)
    with pods.allowing(pods.edges - {cut}):
        summary = complete(pods)["summary"]
        assert summary["drafter_lost"]
        assert summary["rounds"] == summary["new_tokens"]
        assert lost_drafters(pods) == lost + 1
    wait("the drafter is back", lambda: is_drafted(pods), RETURN_SECONDS)


def is_drafted(pods: Pods) -> bool:
    return not complete(pods)["summary"]["drafter_lost"]


def lost_drafters(pods: Pods) -> float:
    """What the orchestrator's metrics say, as monitoring reads them."""
    with closing(pods.connect("monitoring", "orchestrator", "metrics")) as connection:
        asking = http.client.HTTPConnection("orchestrator")
        asking.sock = connection
        asking.request("GET", "/metrics")
        text = asking.getresponse().read().decode()
    (value,) = re.findall(r"^tandem_drafters_lost_total (\S+)$", text, re.M)
    return float(value)
