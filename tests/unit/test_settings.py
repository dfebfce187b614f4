"""Settings: read once, validated, and all documented."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pydantic_settings import BaseSettings

from drafter_svc.settings import DrafterSettings
from orchestrator.settings import OrchestratorSettings
from tandem.errors import StartupError
from tandem.settings import read_settings
from tandem_vllm.settings import PluginSettings
from target_svc.settings import TargetSettings, VllmSettings
from tests.support.repository import ROOT

KINDS: list[type[BaseSettings]] = [
    DrafterSettings,
    TargetSettings,
    VllmSettings,
    OrchestratorSettings,
    PluginSettings,
]
DOCS = ROOT / "docs" / "settings.md"


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_has_a_default_and_a_line_in_the_docs(
    kind: type[BaseSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(variable)
    settings = read_settings(kind)
    documented, missing = DOCS.read_text(), []
    for name, field in kind.model_fields.items():
        variable = f"{kind.model_config['env_prefix']}{name.upper()}"
        default = getattr(settings, name)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        shown = "" if shown is None else shown
        line = f"| `{variable}` | `{shown}` | {field.description} |"
        if line not in documented:
            missing.append(line)
    assert not missing, "\n".join(("paste into docs/settings.md:", *missing))


def test_lists_are_comma_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_ORCHESTRATOR_TARGETS", "a:1, dns:///b:2,")
    monkeypatch.setenv("TANDEM_ORCHESTRATOR_DRAFTERS", "")
    settings = read_settings(OrchestratorSettings)
    assert settings.targets == ("a:1", "dns:///b:2")
    assert settings.drafters == ()


@pytest.mark.parametrize(
    ("kind", "variable", "value"),
    [
        (DrafterSettings, "TANDEM_DRAFTER_MAX_SEQUENCES", "0"),
        (DrafterSettings, "TANDEM_DRAFTER_DRAFT_MASS", "1.5"),
        (TargetSettings, "TANDEM_TARGET_DTYPE", "int8"),
        (TargetSettings, "TANDEM_TARGET_LISTEN", "nowhere"),
        (TargetSettings, "TANDEM_TARGET_LISTEN", "127.0.0.1:65536"),
        (OrchestratorSettings, "TANDEM_ORCHESTRATOR_IDLE_SECONDS", "0"),
        (OrchestratorSettings, "TANDEM_ORCHESTRATOR_GAMMA", "many"),
        (OrchestratorSettings, "TANDEM_ORCHESTRATOR_TARGETS", ""),
    ],
)
def test_a_bad_value_names_its_variable(
    kind: type[BaseSettings], variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(StartupError, match=variable):
        read_settings(kind)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read_settings(TargetSettings).model = "other"  # type: ignore[misc]


def test_settings_need_no_torch() -> None:
    program = (
        "import sys, drafter_svc.settings, target_svc.settings, orchestrator.settings;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=DOCS.parent.parent)
