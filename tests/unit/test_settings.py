"""Settings: read once, validated, and all documented."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from pydantic_settings import BaseSettings

from drafter_svc.settings import DrafterSettings
from orchestrator.settings import OrchestratorSettings
from tandem.drafting.choice.settings import RecipeSettings
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


def test_few_names_stand_before_those_for_experts() -> None:
    usual = DOCS.read_text().split("\n## Expert\n")[0]
    rows = re.findall(r"(?m)^\| `TANDEM_(?:DRAFTER|TARGET|ORCHESTRATOR|VLLM)_([A-Z_]+)`", usual)
    assert 60 < len(set(rows)) <= 90


def test_numbers_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OVERLAP", "3"), ("OVERLAP_GUESSES", "4"), ("OVERLAP_PIPELINES", "2")):
        monkeypatch.setenv(f"TANDEM_TARGET_{name}", value)
    settings = read_settings(TargetSettings)
    assert (settings.overlap, settings.overlap_guesses, settings.overlap_pipelines) == ("3", 4, 2)


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


@pytest.mark.parametrize(
    ("kind", "variable", "like"),
    [
        (TargetSettings, "TANDEM_TARGET_MAX_GAMA", "TANDEM_TARGET_MAX_GAMMA"),
        (TargetSettings, "tandem_target_modell", "TANDEM_TARGET_MODEL"),
        (TargetSettings, "TANDEM_TARGET_METHOD", "docs/settings.md"),
        (DrafterSettings, "TANDEM_DRAFTER_METRICS_PORT", "TANDEM_DRAFTER_METRICS_LISTEN"),
        (OrchestratorSettings, "TANDEM_ORCHESTRATOR_TARGET", "TANDEM_ORCHESTRATOR_TARGETS"),
        (OrchestratorSettings, "TANDEM_ORCHESTRATOR_QQQQQQQQ", "docs/settings.md"),
        (VllmSettings, "TANDEM_TARGET_VLLM_TENSOR_PARALEL", "TANDEM_TARGET_VLLM_TENSOR_PARALLEL"),
        (PluginSettings, "TANDEM_VLLM_DRAFTER", "TANDEM_VLLM_DRAFTERS"),
    ],
)
def test_an_unknown_variable_is_refused(
    kind: type[BaseSettings], variable: str, like: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(StartupError, match=f"{variable}: there is no such setting; .*{like}"):
        read_settings(kind)


# Kubernetes' service links, the client's variables, and those of what runs beside a service.
BESIDE = {
    "TANDEM_TARGET_PORT": "tcp://10.0.0.1:50052",
    "TANDEM_TARGET_PORT_50052_TCP": "tcp://10.0.0.1:50052",
    "TANDEM_TARGET_PORT_50052_TCP_PROTO": "tcp",
    "TANDEM_TARGET_PORT_50052_TCP_PORT": "50052",
    "TANDEM_TARGET_PORT_50052_TCP_ADDR": "10.0.0.1",
    "TANDEM_TARGET_SERVICE_HOST": "10.0.0.1",
    "TANDEM_TARGET_SERVICE_PORT": "50052",
    "TANDEM_TARGET_SERVICE_PORT_GRPC": "50052",
    "TANDEM_TARGET_METRICS_SERVICE_HOST": "10.0.0.1",
    "TANDEM_TARGET_METRICS_PORT": "tcp://10.0.0.1:9464",
    "TANDEM_TARGET_VLLM_EAGER": "true",
    "TANDEM_ADDRESS": "127.0.0.1:1",
    "TANDEM_TOKEN_FILE": "none",
    "TANDEM_DRAFTER_ANYTHING": "1",
    "TANDEM_VLLM_ANYTHING": "1",
}


def test_variables_of_others_are_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in BESIDE.items():
        monkeypatch.setenv(variable, value)
    assert read_settings(TargetSettings) == TargetSettings()
    assert read_settings(RecipeSettings, whole=False) == RecipeSettings()
    monkeypatch.setenv("TANDEM_TARGET_PORT", "50052")
    with pytest.raises(StartupError, match="TANDEM_TARGET_PORT: there is no such setting"):
        read_settings(TargetSettings)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read_settings(TargetSettings).model = "other"  # type: ignore[misc]


def test_settings_need_no_torch() -> None:
    program = (
        "import sys, drafter_svc.settings, target_svc.settings, orchestrator.settings;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=DOCS.parent.parent)
