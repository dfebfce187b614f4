"""The endpoints that the manifests' NetworkPolicies concern: our own pods, and all others."""

from __future__ import annotations

import yaml

from tests.support.cluster.manifests import KUBERNETES, Manifests
from tests.support.cluster.network_policy import Endpoint

# A port that no policy may name, such as a debugger's.
OTHER = {"other": ("TCP", 5678)}


def endpoints(manifests: Manifests) -> list[Endpoint]:
    """The pods of the manifests, and everything that might connect to them or be connected to."""
    (namespace,) = manifests.all("Namespace")
    own = manifests.get("Namespace", namespace)["metadata"]["labels"]
    named = {"kubernetes.io/metadata.name": namespace} | own
    job = yaml.safe_load((KUBERNETES.parent / "ghz" / "job.yaml").read_text())
    pods = [
        Endpoint(
            name,
            namespace,
            template["metadata"]["labels"],
            named,
            {
                port["name"]: ("TCP", port["containerPort"])
                for box in template["spec"]["containers"]
                for port in box["ports"]
            }
            | OTHER,
        )
        for name, template in manifests.templates().items()
    ]
    return [
        *pods,
        Endpoint("job", namespace, job["spec"]["template"]["metadata"]["labels"], named, OTHER),
        Endpoint("shell", namespace, {}, named, OTHER),
        _elsewhere("client", "customers", {}, https=("TCP", 443)),
        _elsewhere("stranger", "default", {"tandem-client": "true"}, https=("TCP", 443)),
        _elsewhere("monitoring", "monitoring", {}, otlp=("TCP", 4317), http=("TCP", 9090)),
        _elsewhere(
            "dns", "kube-system", {"k8s-app": "kube-dns"}, dns=("UDP", 53), dns_tcp=("TCP", 53)
        ),
        _elsewhere("api", "kube-system", {}, https=("TCP", 443)),
        Endpoint("internet", None, ports={"https": ("TCP", 443)}),
    ]


def _elsewhere(name: str, where: str, labels: dict[str, str], **ports: tuple[str, int]) -> Endpoint:
    extra = {"tandem-client": "true"} if where == "customers" else {}
    return Endpoint(name, where, labels, {"kubernetes.io/metadata.name": where} | extra, ports)
