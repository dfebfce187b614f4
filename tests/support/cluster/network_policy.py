"""What NetworkPolicies allow, by the rules of networking.k8s.io/v1, except ipBlock."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Edge = tuple[str, str, str]


@dataclass(frozen=True)
class Endpoint:
    """A pod, or an endpoint outside of the cluster.

    Attributes:
        name: in edges.
        namespace: of the pod; None outside of the cluster.
        labels: of the pod.
        namespace_labels: of its namespace.
        ports: that it listens on, by name: protocol and number.
    """

    name: str
    namespace: str | None
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, tuple[str, int]] = field(default_factory=dict)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector (of apimachinery) selects an object with these labels."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    for expression in selector.get("matchExpressions", ()):
        if not _holds(expression, labels.get(expression["key"])):
            return False
    return True


def _holds(expression: Mapping[str, Any], value: str | None) -> bool:
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(expression["operator"])


def allowed_edges(
    policies: Sequence[Mapping[str, Any]],
    ends: Sequence[Endpoint],
    sides: Collection[str] = ("Ingress", "Egress"),
) -> set[Edge]:
    """The connections that may be opened: (from, to, port's name).

    Args:
        policies: NetworkPolicy documents.
        ends: all endpoints.
        sides: which policies count: those of the target (Ingress), of the source (Egress), or both.
    """
    return {
        (source.name, target.name, port)
        for source in ends
        for target in ends
        for port in target.ports
        if ("Egress" not in sides or _passes(policies, "Egress", source, target, target, port))
        and ("Ingress" not in sides or _passes(policies, "Ingress", target, source, target, port))
    }


def _passes(
    policies: Sequence[Mapping[str, Any]],
    direction: str,
    selected: Endpoint,
    peer: Endpoint,
    target: Endpoint,
    port: str,
) -> bool:
    """Whether the policies that select one end of a connection allow it on that end's side."""
    applying = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == selected.namespace
        and direction in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], selected.labels)
    ]
    if not applying:
        return True
    side = "from" if direction == "Ingress" else "to"
    return any(
        _is_peer(rule.get(side), selected, peer) and _is_port(rule.get("ports"), target, port)
        for spec in applying
        for rule in spec.get(direction.lower(), ())
    )


def _is_peer(peers: Sequence[Mapping[str, Any]] | None, selected: Endpoint, peer: Endpoint) -> bool:
    if not peers:
        return True
    for one in peers:
        assert set(one) <= {"podSelector", "namespaceSelector"}, "ipBlock is not modelled"
        if peer.namespace is None:
            continue
        if "namespaceSelector" in one:
            within = selects(one["namespaceSelector"], peer.namespace_labels)
        else:
            within = peer.namespace == selected.namespace
        if within and selects(one.get("podSelector", {}), peer.labels):
            return True
    return False


def _is_port(ports: Sequence[Mapping[str, Any]] | None, target: Endpoint, name: str) -> bool:
    if not ports:
        return True
    protocol, number = target.ports[name]
    return any(
        one.get("protocol", "TCP") == protocol
        and one.get("port") in (None, number, name)
        and "endPort" not in one
        for one in ports
    )
