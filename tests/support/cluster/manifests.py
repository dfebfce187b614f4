"""The Kubernetes manifests: the base by itself, and variants rendered by kustomize."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import BaseSettings

from drafter_svc.settings import DrafterSettings
from orchestrator.settings import OrchestratorSettings
from tandem.settings import ServiceSettings
from target_svc.settings import TargetSettings, VllmSettings
from tests.support.repository import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
BIN = ROOT / ".cache" / "bin"
SERVICES = ("drafter", "target", "orchestrator")
SETTINGS: dict[str, type[ServiceSettings]] = {
    "drafter": DrafterSettings,
    "target": TargetSettings,
    "orchestrator": OrchestratorSettings,
}

Document = dict[str, Any]

# The variants that tests render: an overlay, and components that an operator may add to it.
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cpu-demo": ("cpu-demo", ()),
    "single-gpu": ("single-gpu", ()),
    "two-tier": ("two-tier", ()),
    "large-target": ("large-target", ()),
    "cpu-demo, otel, monitoring, hpa": ("cpu-demo", ("otel", "monitoring", "autoscaling-hpa")),
    "single-gpu, sidecar": ("single-gpu", ("sidecar-orchestrator",)),
    "two-tier, otel, monitoring, keda": ("two-tier", ("otel", "monitoring", "autoscaling-keda")),
    "two-tier, ingress": ("two-tier", ("ingress",)),
    "cpu-demo, otel, monitoring, tls": ("cpu-demo", ("otel", "monitoring", "tls")),
    "two-tier, tls": ("two-tier", ("tls",)),
    "single-gpu, sidecar, tls": ("single-gpu", ("sidecar-orchestrator", "tls")),
    "two-tier, monitoring, hpa, sidecar": (
        "two-tier",
        ("monitoring", "autoscaling-hpa", "sidecar-orchestrator"),
    ),
}


@dataclass(frozen=True)
class Manifests:
    """Documents that would be applied together.

    Attributes:
        name: of the variant.
        documents: one per resource.
    """

    name: str
    documents: tuple[Document, ...]

    def all(self, kind: str) -> dict[str, Document]:
        """All documents of a kind, by name."""
        return {
            document["metadata"]["name"]: document
            for document in self.documents
            if document["kind"] == kind
        }

    def get(self, kind: str, name: str) -> Document:
        return self.all(kind)[name]

    def templates(self) -> dict[str, Document]:
        """Pod templates of the Deployments, by name."""
        found = self.all("Deployment")
        return {name: document["spec"]["template"] for name, document in found.items()}

    def containers(self) -> dict[str, tuple[Document, Document]]:
        """Each service's pod template and the container in it that runs the service."""
        return {
            container["name"]: (template, container)
            for template in self.templates().values()
            for container in template["spec"]["containers"]
        }

    def environment(self, service: str, fields: Mapping[str, str] | None = None) -> dict[str, str]:
        """The variables of a service's container, as a kubelet would set them.

        Args:
            service: the container's name.
            fields: of the running pod, by path; without them, variables from fields are left out.
        """
        _, container = self.containers()[service]
        found: dict[str, str] = {}
        for source in container["envFrom"]:
            found |= self.get("ConfigMap", source["configMapRef"]["name"])["data"]
        for entry in container["env"]:
            if "value" in entry:
                found[entry["name"]] = _expand(entry["value"], found)
            elif fields is not None:
                found[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        return found

    def policies(self) -> list[Document]:
        """The NetworkPolicies, each with its namespace, which in the base kustomize would add."""
        (namespace,) = self.all("Namespace")
        return [
            policy | {"metadata": policy["metadata"] | {"namespace": namespace}}
            for policy in self.all("NetworkPolicy").values()
        ]

    def settings(self, service: str, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
        """The settings object from a container's environment."""
        for variable in list(os.environ):
            if variable.startswith("TANDEM_"):
                monkeypatch.delenv(variable)
        for variable, value in self.environment(service).items():
            monkeypatch.setenv(variable, value)
        return SETTINGS[service]()


def _expand(value: str, variables: Mapping[str, str]) -> str:
    """Replace $(NAME) by variables; unknown ones stay unchanged."""
    return re.sub(r"\$\((\w+)\)", lambda name: variables.get(name[1], name[0]), value)


def known_variables(services: Sequence[str] = SERVICES) -> set[str]:
    """Names of the variables that services read."""
    kinds: list[type[BaseSettings]] = [SETTINGS[service] for service in services]
    if "target" in services:
        kinds.append(VllmSettings)
    return {
        f"{kind.model_config['env_prefix']}{field.upper()}"
        for kind in kinds
        for field in kind.model_fields
    }


def tool(name: str) -> str | None:
    """Path of a program that deploy/kubernetes/fetch.sh has built, else one on PATH."""
    return shutil.which(name, path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")


def base() -> Manifests:
    """The base and the images, combined without kustomize: ConfigMaps have no hashes in names."""
    folder = KUBERNETES / "base"
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    documents = [
        document
        for path in kustomization["resources"]
        for document in yaml.safe_load_all((folder / path).read_text())
    ]
    for generator in kustomization["configMapGenerator"]:
        (path,) = generator["envs"]
        documents.append(_config_map(generator["name"], (folder / path).read_text()))
    result = Manifests("base", tuple(documents))
    for _, container in result.containers().values():
        container["image"] = images()[container["image"]]
    return result


def _config_map(name: str, lines: str) -> Document:
    data = dict(line.split("=", 1) for line in lines.splitlines() if line and line[0] != "#")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def images() -> Mapping[str, str]:
    """The image that each image name in the base stands for."""
    path = KUBERNETES / "components" / "images" / "kustomization.yaml"
    return {
        image["name"]: f"{image['newName']}:{image['newTag']}"
        for image in yaml.safe_load(path.read_text())["images"]
    }


@cache
def render(variant: str, folder: Path) -> Manifests:
    """A variant as rendered by kustomize.

    Args:
        variant: a key of VARIANTS.
        folder: for the overlay, if components are added.
    """
    text = render_text(variant, folder)
    return Manifests(variant, tuple(yaml.safe_load_all(text)))


def render_text(variant: str, folder: Path) -> str:
    """The rendered variant as YAML."""
    program = tool("kustomize")
    assert program is not None
    built = subprocess.run(
        [program, "build", str(overlay_folder(variant, folder))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert built.returncode == 0, built.stderr
    return built.stdout


def overlay_folder(variant: str, folder: Path) -> Path:
    """The overlay's own folder, or a new overlay that adds components as an operator would."""
    overlay, components = VARIANTS[variant]
    shipped = KUBERNETES / "overlays" / overlay
    if not components:
        return shipped
    own = folder / variant.replace(", ", "-")
    own.mkdir(exist_ok=True)

    def relative(path: Path) -> str:
        return os.path.relpath(path.resolve(), own.resolve())

    added = [relative(KUBERNETES / "components" / one) for one in (*components, "images")]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(shipped)],
        "components": added,
    }
    (own / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return own
