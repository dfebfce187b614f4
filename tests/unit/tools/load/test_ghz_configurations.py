"""The files in `deploy/ghz` agree with the services that they call, and its Job is restricted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from google.protobuf.json_format import ParseDict

from orchestrator.settings import OrchestratorSettings
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.support.repository import ROOT

FOLDER = ROOT / "deploy" / "ghz"
LISTEN = str(OrchestratorSettings.model_fields["listen"].default)
SERVICE = pb.DESCRIPTOR.services_by_name["OrchestratorService"].full_name


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*-*.json")), ids=lambda p: p.stem)
def test_ghz_configurations_call_what_there_is(path: Path) -> None:
    config = json.loads(path.read_text())
    service, _, method = config["call"].rpartition(".")
    assert service == SERVICE
    assert method.lower() == path.stem.partition("-")[0]
    assert config["host"] == LISTEN
    kinds: dict[str, Any] = {"Complete": pb.CompleteRequest, "Generate": pb.GenerateRequest}
    for row in json.loads((path.parent / config["data-file"]).read_text()):
        message = kinds[method]()
        ParseDict(json.loads(json.dumps(row).replace("{{.RequestNumber}}", "1")), message)
        assert message.generation.prompt
    # ghz kills what is on its way at the end of a duration, unless it is told to wait.
    assert config.get("duration-stop", "close") == ("wait" if "duration" in config else "close")


def test_the_job_of_ghz_is_restricted_and_its_image_named_once() -> None:
    job = yaml.safe_load((FOLDER / "job.yaml").read_text())
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not spec["automountServiceAccountToken"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (image,) = kustomization["images"]
    assert container["image"] == image["name"]
    text = "".join(p.read_text() for p in FOLDER.iterdir() if p.suffix == ".yaml")
    assert text.count(image["newName"]) == 1
    version = image["newTag"]
    for where in (FOLDER / "fetch.sh", ROOT / "tandem/tools/load/ghz/tool.py"):
        assert f"v{version}" in where.read_text()
    (generated,) = kustomization["configMapGenerator"]
    (volume,) = spec["volumes"]
    assert volume["configMap"]["name"] == generated["name"]
    assert container["args"][:2] == ["--config", generated["files"][0]]
    for name in generated["files"]:
        assert (FOLDER / name).exists()
    assert container["args"][-1] == f"orchestrator:{LISTEN.rpartition(':')[2]}"
