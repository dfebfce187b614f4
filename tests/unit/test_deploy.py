"""What `deploy/` says agrees with the code: images, and load (Kubernetes: test_kubernetes)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from orchestrator.settings import OrchestratorSettings
from tandem.orchestrator.v1 import orchestrator_pb2 as pb

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
ORCHESTRATOR = pb.DESCRIPTOR.services_by_name["OrchestratorService"].full_name


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
