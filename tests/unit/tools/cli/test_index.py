"""tandem index: builds, lists, and says what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.retrieval.index import Index, find_index
from tandem.tools.cli.main import app
from tests.support.repository import ROOT

TOKENIZER = str(ROOT / "models" / "target")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["index", *arguments])
    return result.exit_code, result.output


def test_an_index_is_built_in_the_cache_folder_and_listed(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.py").write_text("def a():\n    return 1\n" * 3)
    (tmp_path / "texts" / "b.txt").write_text("other")
    code, shown = run(
        "build", str(tmp_path / "texts"), "--tokenizer", TOKENIZER, "--pattern", "*.py"
    )
    assert code == 0, shown
    about = Index(find_index("")).about
    assert f"{about.tokens} tokens of 1 files" in shown
    assert about.source == "texts"
    code, shown = run("list")
    assert code == 0
    assert f"tokens of 1 files of texts, tokenizer {about.tokenizer[:12]}" in shown


def test_what_is_missing_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    code, shown = run("build", str(tmp_path / "texts"), "--tokenizer", "nowhere")
    assert (code, shown.count("\n")) == (2, 1)
    assert "cannot read the tokenizer nowhere" in shown
    code, shown = run("build", str(tmp_path / "texts"), "--tokenizer", TOKENIZER)
    assert code == 2
    assert "no text in texts" in shown
    code, shown = run("list")
    assert code == 0
    assert "no index in" in shown
