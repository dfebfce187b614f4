"""What docs/recipes.md and `tandem up --help` say of drafting methods agrees with their table."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from tandem.drafting.drafter import settings_of
from tandem.drafting.methods import METHODS
from tandem.tools.cli.main import app
from tests.support.laws.suited import rules_for
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "recipes.md").read_text()


def row_of(name: str) -> str:
    """A method's row of the page."""
    recipe = METHODS[name]
    keys = [key for key in recipe.model_fields if key not in ("method", "model")]
    settings = [setting.name.upper() for setting, _ in settings_of(recipe).values()]
    rules = [rule.name for rule in rules_for(recipe.drafter)]
    names = (", ".join(f"`{one}`" for one in several) for several in (keys, settings, rules))
    return f"| {' | '.join((f'`{name}`', recipe.drafts, *(one or 'none' for one in names)))} |"


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_its_row_in_the_docs(name: str) -> None:
    assert row_of(name) in PAGE.splitlines(), f"paste into docs/recipes.md:\n{row_of(name)}"


def test_no_row_is_of_another_method() -> None:
    table = PAGE.partition("| built in |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) <= set(METHODS)


def test_help_names_every_method() -> None:
    shown = CliRunner().invoke(app, ["up", "--help"], env={"COLUMNS": "240"}).stdout
    assert f"How to draft: {', '.join(METHODS)}, or a TOML file." in shown
