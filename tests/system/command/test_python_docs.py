"""docs/python.md: each of its examples runs, against services of this machine."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.models.chat_templates import TEMPLATES
from tests.support.processes.services import trio
from tests.support.repository import ROOT

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)


# It starts services of its own.
LOCAL = "tandem.Local("


def run(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run an example, which prints something."""
    exec(compile(example, "docs/python.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def test_its_examples_run(
    embedded_pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "target"
    shutil.copytree(embedded_pair[1], target)
    (target / "chat_template.jinja").write_text(TEMPLATES["qwen-2.5"])
    models = {"MODEL": str(embedded_pair[0])}, {"MODEL": str(target)}
    examples = [example for example in EXAMPLES if LOCAL not in example]
    assert len(examples) >= 5
    with trio(tmp_path / "logs", drafter=models[0], target=models[1]) as services:
        monkeypatch.setenv("TANDEM_ADDRESS", services.orchestrator.address)
        for example in examples:
            run(example, capsys)


@pytest.mark.campaign(
    "`tandem.Local` in a script",
    "unit/tools/local; the page's other examples (this file)",
)
def test_the_services_in_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (example for example in EXAMPLES if LOCAL in example)
    run(example, capsys)
