"""docs/security.md: its commands make the files that its settings name, and services load them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tandem.client.connection import Connection
from tandem.tools.local.endpoints import endpoint_of
from tests.support.cluster.manifests import known_variables
from tests.support.processes.services import generation, trio
from tests.support.repository import ROOT

pytestmark = pytest.mark.campaign(
    "commands of docs/security.md make files that services load",
    "service/security: services with certificates and tokens",
)

DOCS = ROOT / "docs" / "security.md"
BLOCKS = re.findall(r"```sh\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
# Of the commands; the services have known ones only.
CLIENTS = {"TANDEM_CA", "TANDEM_CERT", "TANDEM_KEY", "TANDEM_TLS_NAME", "TANDEM_TOKEN_FILE"}


def exported(block: str) -> dict[str, str]:
    """The variables that a block sets."""
    lines = re.findall(r"^export ([^#\n]*)", block, re.M)
    words = [word for line in lines for word in line.split()]
    return dict(word.split("=", 1) for word in words)


def test_every_variable_is_one() -> None:
    _, settings, web_tokens = map(exported, BLOCKS)
    assert {*settings, *web_tokens} <= known_variables() | CLIENTS


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_its_commands_secure_the_services(
    tmp_path: Path, random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, settings, _ = BLOCKS
    subprocess.run(["sh", "-euc", make], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    variables = {
        name: str(tmp_path / value) if (tmp_path / value).is_file() else value
        for name, value in exported(settings).items()
    }
    # The drafter's are the target's by another name.
    variables |= {
        name.replace("TARGET", "DRAFTER"): value.replace("/target.", "/drafter.")
        for name, value in variables.items()
        if name.startswith("TANDEM_TARGET_")
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    models = dict(zip(("drafter", "target"), map(str, random_pair), strict=True))
    with trio(
        tmp_path / "logs",
        drafter={"MODEL": models["drafter"]},
        target={"MODEL": models["target"]},
    ) as services:
        with Connection(services.stack.endpoint("orchestrator")) as client:
            reply = client.complete(generation([1], max_new_tokens=8, gamma=2), 30)
        assert reply.summary.drafted_tokens
        own = prefixed("TANDEM_ORCHESTRATOR_", variables)
        monkeypatch.delenv("TANDEM_TOKEN_FILE")
        place = endpoint_of("orchestrator", services.orchestrator.address, own, own)
        with Connection(place) as client, pytest.raises(Exception, match="no bearer token"):
            client.complete(generation([1], max_new_tokens=8, gamma=2), 30)


def prefixed(prefix: str, variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(prefix): value
        for name, value in variables.items()
        if name.startswith(prefix)
    }
