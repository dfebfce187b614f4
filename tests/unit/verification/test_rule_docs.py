"""What the command's help says of rules agrees with their table."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from tandem.tools.cli.main import app
from tandem.verification import VERIFIERS


@pytest.mark.parametrize("command", ["up", "generate"])
def test_help_names_every_rule(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    (line,) = [line for line in shown.splitlines() if "--verifier " in line]
    assert set(VERIFIERS) <= set(re.findall(r"\w+", line)), (
        "name all in RULES of tandem/tools/cli/options.py"
    )
