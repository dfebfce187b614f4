"""Drafting methods of other packages: found by name, checked, and loaded only if named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.loading import load
from drafter_svc.settings import DrafterSettings
from tandem.drafting.choice.built_in import recipe_of
from tandem.drafting.choice.installed import GROUP, drafter_of
from tandem.drafting.choice.recipe_file import read_recipe
from tandem.engine.asks import Truncation
from tandem.errors import StartupError
from tests.support.installed_packages import install, on_path
from tests.support.processes.refusals import refusal

MODULE = "own_method"
METHOD = """
from typing import Annotated, ClassVar, Literal

from tandem.drafting.decoders.branching import LargestTree
from tandem.drafting.drafter import Drafter, Recipe, Setting, Traits
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import FeedbackWanted
from tandem.speculation.tree import DraftShape


class OwnDrafter(Drafter):
    def draft(self, sequence, round_, gamma, budget):
        yield from ()
        return Draft.certain(sequence.token_ids[-1:])


class OwnRecipe(Recipe):
    drafts: ClassVar = "one token"
    drafter: ClassVar = OwnDrafter

    method: Literal["own"] = "own"
    tokens: int = 1

    def make(self, scorers, truncation):
        return OwnDrafter()
"""


def traits(said: str, sentence: str) -> tuple[str, str, str]:
    """A drafter that says this of itself, and what is wrong with that."""
    return "def draft(", f"traits = Traits({said})\n    def draft(", sentence


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with on_path(tmp_path, MODULE):
        yield tmp_path


def installed(
    folder: Path, text: str, name: str = "own", value: str = f"{MODULE}:OwnRecipe"
) -> None:
    install(folder, MODULE, text, {GROUP: {name: value}})


def test_settings_and_files_name_it(folder: Path) -> None:
    installed(folder, METHOD)
    recipe: Any = recipe_of(DrafterSettings(method="own"))
    assert (recipe.method, recipe.tokens) == ("own", 1)
    assert recipe_of(DrafterSettings(recipe="own")) == recipe
    path = folder / "recipe.toml"
    path.write_text('method = "own"\ntokens = 3\n')
    assert read_recipe(path) == recipe.model_copy(update={"tokens": 3})
    path.write_text('method = "own"\ntoken = 3\n')
    with pytest.raises(StartupError, match="token: is an unknown key"):
        read_recipe(path)
    path.write_text('method = "cascade"\ninner = { method = "own" }\n')
    with pytest.raises(StartupError, match=r"inner\.method: 'own' is unknown here"):
        read_recipe(path)


def test_a_key_takes_a_built_in_methods_setting(folder: Path) -> None:
    tree = METHOD.replace("tokens: int = 1", "max_nodes: LargestTree = 4")
    installed(folder, tree)
    recipe: Any = recipe_of(DrafterSettings(method="own", max_nodes=9))
    assert recipe.max_nodes == 9


def test_it_is_imported_only_if_it_is_named(folder: Path) -> None:
    installed(folder, "raise SystemExit(3)")
    assert recipe_of(DrafterSettings()).method == "model"
    settings = DrafterSettings(method="own", recipe="lookup")
    assert recipe_of(settings).method == "lookup"
    assert load(DrafterSettings(method="lookup")).method == "lookup"
    assert MODULE not in sys.modules


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("import Annotated", "import Nothing", "cannot be imported from own_method:OwnRecipe"),
        ("class OwnRecipe(", "class Other(", "has no attribute 'OwnRecipe'"),
        ("class OwnRecipe(Recipe)", "class OwnRecipe", "is no class derived from tandem.drafting"),
        ("def make", "def made", "lacks make"),
        ('Literal["own"] = "own"', 'Literal["mine"] = "mine"', "lacks its name as a key: "),
        ('Literal["own"] = "own"', 'str = "own"', 'method: Literal["own"]'),
        ("drafts: ClassVar", "draft: ClassVar", "lacks drafts: a few words on what it drafts"),
        ("drafter: ClassVar", "makes: ClassVar", "lacks drafter: a class derived from"),
        ("ClassVar = OwnDrafter", "ClassVar = dict", "lacks drafter: a class derived from"),
        ("def draft(", "def drafted(", "has a drafter, OwnDrafter, that lacks draft"),
        ("yield from ()", "pass", "OwnDrafter, whose draft must be a generator: begin with `yield"),
        ("def draft(", "traits = Traits(shape=2)\n    def draft(", "whose shape is no DraftShape"),
        (
            "def draft(",
            "traits = 2\n    def draft(",
            "OwnDrafter, that lacks traits: a value of tandem.drafting.drafter.Traits",
        ),
        (
            "def draft(",
            "shape = DraftShape.CHAIN\n    pure = True\n    def draft(",
            "OwnDrafter, that lacks shape, pure among its traits: write traits ="
            " Traits(shape=..., pure=...)",
        ),
        (
            "yield from ()",
            "yield from ()\n    def go_on(self, sequence):\n        yield from ()",
            "OwnDrafter, whose go_on is never called: write observe and draft",
        ),
        (
            "tokens: int = 1",
            'tokens: Annotated[int, Setting("own_tokens", "")] = 1',
            "has keys marked as the settings own_tokens, which the service does not have",
        ),
        ("tokens: int = 1", "tokens: int", "the recipe own needs a file: tokens: Field required"),
    ],
)
def test_what_is_missing_is_said(folder: Path, old: str, new: str, sentence: str) -> None:
    assert old in METHOD
    installed(folder, METHOD.replace(old, new))
    with pytest.raises(StartupError) as refused:
        recipe_of(DrafterSettings(method="own"))
    assert sentence in str(refused.value)
    assert "needs a file" in sentence or "'own' of the package own_method 0.1" in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "return OwnDrafter()",
            "return object()",
            "is of the class object, and not of the announced OwnDrafter",
        ),
        ("return OwnDrafter()", "return scorers[7]", "cannot make its drafter: tuple index out of"),
        traits("pure=1", "has a trait pure that is no bool"),
        traits("feedback=None", "a trait feedback that is no FeedbackWanted"),
        traits("largest_tree=4", "has largest_tree 4, and its recipe 0"),
        traits("shape=DraftShape.TREE", "has shape TREE, so largest_tree must be 1..256"),
        traits("looks=1", "sets looks, so the traits of its class must have prepares = True"),
        traits(
            "looks=1, prepares=True, feedback=FeedbackWanted(top=1)",
            "sets looks and wants feedback",
        ),
        (
            "def draft(",
            "def __init__(self):\n        self.traits = 2\n\n    def draft(",
            "lacks traits: a value of tandem.drafting.drafter.Traits",
        ),
        (
            "def draft(",
            "def __init__(self):\n        self.largest_tree = 4\n\n    def draft(",
            "lacks largest_tree among its traits: write traits = Traits(largest_tree=...)",
        ),
        (
            "return OwnDrafter()",
            "return type('Derived', (OwnDrafter,), {'pure': True})()",
            "lacks pure among its traits: write traits = Traits(pure=...)",
        ),
    ],
)
def test_a_contradiction_is_said(folder: Path, old: str, new: str, sentence: str) -> None:
    installed(folder, METHOD.replace(old, new))
    recipe = recipe_of(DrafterSettings(method="own"))
    with pytest.raises(StartupError) as refused:
        drafter_of(recipe, (), Truncation(1.0, 0))
    assert sentence in str(refused.value)


def test_a_taken_name_is_refused_where_it_is_asked_for(folder: Path) -> None:
    installed(folder, "raise SystemExit(3)", "lookup")
    assert recipe_of(DrafterSettings()).method == "model"
    with pytest.raises(StartupError, match=r"'lookup' of .* has the name of a built-in method"):
        recipe_of(DrafterSettings(method="lookup"))
    assert MODULE not in sys.modules


def test_a_name_that_is_registered_twice_is_refused(folder: Path) -> None:
    installed(folder, METHOD)
    install(folder, "another", "", {GROUP: {"own": "another:Recipe"}})
    with pytest.raises(StartupError, match=r"more than once \(another 0.1, own_method 0.1\)"):
        recipe_of(DrafterSettings(recipe="own"))


def test_a_service_exits_with_2_and_one_line(folder: Path) -> None:
    installed(folder, METHOD.replace("def make", "def made"))
    given = {"PYTHONPATH": str(folder), "TANDEM_DRAFTER_METHOD": "own"}
    assert refusal("drafter_svc", given) == (
        f"drafter: {GROUP}: 'own' of the package own_method 0.1 lacks make"
    )


def test_a_service_refuses_a_drafter_of_the_version_before(folder: Path) -> None:
    installed(folder, METHOD.replace("def draft(", "pure = True\n    def draft("))
    given = {"PYTHONPATH": str(folder), "TANDEM_DRAFTER_METHOD": "own"}
    assert refusal("drafter_svc", given) == (
        f"drafter: {GROUP}: 'own' of the package own_method 0.1 has a drafter, OwnDrafter, that"
        " lacks pure among its traits: write traits = Traits(pure=...)"
    )


def test_another_packages_broken_metadata_stops_no_method(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = folder / "broken-0.1.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.1\n")
    about.joinpath("entry_points.txt").write_text("[any.group]\na name alone\n")
    assert recipe_of(DrafterSettings(method="lookup")).method == "lookup"
    assert "entry points cannot be read" in capsys.readouterr().out
