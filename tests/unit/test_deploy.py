"""What `deploy/` says agrees with the code: images, and load (Kubernetes: test_kubernetes)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from orchestrator.settings import OrchestratorSettings
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.manifests import SERVICES, known_variables

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
ORCHESTRATOR = pb.DESCRIPTOR.services_by_name["OrchestratorService"].full_name


def test_images_read_settings_that_there_are() -> None:
    used = set(re.findall(r"\bTANDEM_[A-Z_]+", CONTAINERFILE))
    assert used
    assert used <= known_variables()


@pytest.mark.parametrize("name", SERVICES)
def test_images_hold_what_they_run(name: str) -> None:
    stages = dict(re.findall(r"^FROM .* AS (\S+)\n((?:(?!FROM ).*\n)*)", CONTAINERFILE, re.M))
    module = {"drafter": "drafter_svc", "target": "target_svc"}.get(name, name)
    assert f'ENTRYPOINT ["python", "-m", "{module}"]' in stages[name]
    assert f"COPY {module}/ {module}/" in stages[name]
    base = "build-base" if name == "orchestrator" else "build-inference"
    assert f"COPY --from={base} " in stages[name]
    assert "inference" not in stages["build-base"]
    for build in ("build-base", "build-inference"):
        assert "--require-hashes" in stages[build]
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE, re.M)
    ignored = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    for path in " ".join(copied).split():
        assert f"!{path.rstrip('/')}" in ignored


def test_base_image_is_pinned() -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", CONTAINERFILE, re.M)
    assert re.search(r":\d+\.\d+-slim$", base)


def test_settings_need_no_torch() -> None:
    program = (
        "import sys, drafter_svc.settings, target_svc.settings, orchestrator.settings;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=DEPLOY.parent)


@pytest.mark.parametrize("name", ["complete", "generate"])
def test_ghz_requests_are_requests(name: str) -> None:
    config = json.loads((DEPLOY / "ghz" / f"{name}.json").read_text())
    service, _, method = config["call"].rpartition(".")
    assert service == ORCHESTRATOR
    kinds: dict[str, Any] = {"Complete": pb.CompleteRequest, "Generate": pb.GenerateRequest}
    data = json.loads(json.dumps(config["data"]).replace("{{.RequestNumber}}", "1"))
    message = kinds[method]()
    ParseDict(data, message)
    assert message.generation.prompt
    assert config["host"] == OrchestratorSettings.model_fields["listen"].default
