"""tandem distill: trains, goes on, and says in a line what it cannot do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.distillation import run as runs
from tandem.distillation.allocator import SETTINGS
from tandem.errors import EngineFailure
from tandem.tools.cli.commands.drafters import distill as command
from tandem.tools.cli.main import app
from tests.support.distilling import small_plan


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options of a small run, but for its output."""
    plan = small_plan(tmp_path_factory.mktemp("pair"))
    sizes = ["--rows", "2", "--length", "12", "--steps", "2", "--threads", "1"]
    return [
        *("--target", plan.target, "--drafter", plan.drafter, "--prompts", plan.prompts),
        *("--data", "corpus", *sizes),
    ]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without starting this process again, and with few texts."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tandem.distillation.held_out._ROWS", 2)


def distil(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["distill", *arguments])
    return result.exit_code, result.output


def test_a_run_shows_what_it_gained_and_goes_on(pair: list[str], tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    code, shown = distil(*pair, "--out", output)
    assert code == 0, shown
    assert "α at temperature 1, held-out text" in shown
    assert f"{output}: the drafter of step" in shown
    assert " of 2, " in shown
    code, shown = distil(*pair, "--steps", "3", "--out", output)
    assert code == 0, shown
    assert "it goes on after step 2" in shown
    assert " of 3, " in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompts", "nowhere"], "cannot read nowhere"),
        (["--layers", "2"], "give the drafter's directory, or layers and width"),
        (["--target", "127.0.0.1:1"], "no target serves there"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--data", "mixed", "--divergence", "cross-entropy"], "teach it nothing"),
        (["--target", "models/nowhere"], "cannot read the tokenizer of models/nowhere"),
    ],
)
def test_what_cannot_work_is_a_line(
    arguments: list[str], says: str, pair: list[str], tmp_path: Path
) -> None:
    code, shown = distil(*pair, *arguments, "--out", str(tmp_path / "out"))
    assert code == 2, shown
    assert shown.startswith("tandem: ")
    assert shown.count("\n") == 1
    assert says in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (EngineFailure("the loss of step 3 is not finite"), "the loss of step 3 is not finite"),
        (OSError(28, "No space left on device"), "is kept, and the same command goes on"),
    ],
)
def test_a_run_that_fails_says_so(
    error: Exception,
    says: str,
    pair: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(runs, "distill", fail)
    code, shown = distil(*pair, "--out", str(tmp_path / "out"))
    assert (code, shown.count("\n")) == (1, 1)
    assert says in shown


def test_without_torch_it_names_the_extra(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    code, shown = distil(*pair, "--out", str(tmp_path / "out"))
    assert code == 2
    assert "pip install 'tandem-llm[distill]'" in shown


def test_it_starts_again_with_an_allocator_that_keeps_memory(
    pair: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Replaced(BaseException):
        pass

    def execve(program: str, arguments: list[str], environment: dict[str, str]) -> None:
        assert SETTINGS.keys() <= environment.keys()
        assert environment["MALLOC_MMAP_MAX_"] == "0"
        raise Replaced

    monkeypatch.delenv("MALLOC_TOP_PAD_")
    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(Replaced):
        distil(*pair, "--out", str(tmp_path / "out"))


def test_a_plan_is_kept_beside_the_drafter(pair: list[str], tmp_path: Path) -> None:
    distil(*pair, "--out", str(tmp_path / "out"))
    plan = json.loads((tmp_path / "out" / "run" / "plan.json").read_text())
    assert (plan["divergence"], plan["data"], plan["rows"]) == ("tvd", "corpus", 2)
