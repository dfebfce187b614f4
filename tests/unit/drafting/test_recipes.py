"""Recipes: what a file may contain, errors for bad ones, what a service reports of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.loading import load
from drafter_svc.settings import DrafterSettings
from tandem.drafting.choice.built_in import built_in, recipe_of
from tandem.drafting.choice.installed import contradiction_of, fault_of
from tandem.drafting.choice.recipe_file import read_recipe
from tandem.drafting.composed.forest import ForestDrafter, ForestRecipe
from tandem.drafting.decoders.tree import TreeRecipe
from tandem.drafting.drafter import settings_of
from tandem.drafting.heads.medusa import MedusaRecipe
from tandem.drafting.methods import METHODS
from tandem.engine.asks import Truncation
from tandem.errors import StartupError
from tandem.inference.decoder import Decoder
from tandem.settings import read_settings
from tandem.speculation.tree import DraftShape
from tests.support.laws.tables import HeadTable
from tests.support.models.tiny import save_random_llama
from tests.support.processes.refusals import refusal

FOREST = """
method = "forest"
max_nodes = 12

[[parts]]
method = "tree"
acceptance = [0.7, 0.1]
max_nodes = 8

[[parts]]
method = "model"
model = "somewhere/second"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def test_a_file_says_what_drafts(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, FOREST))
    assert isinstance(recipe, ForestRecipe)
    assert [each.path for each in recipe.checkpoints] == ["", "somewhere/second"]
    trees = (recipe.largest_tree, *(part.largest_tree for part in recipe.parts))
    assert trees == (12, 8, 0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "method: is missing"),
        ('method = "trees"', "method: 'trees' is unknown here; use one of 'model', 'tree'"),
        ('method = "tree"\nacceptence = [0.5]', "acceptence: is an unknown key"),
        ('method = "tree"\nmax_nodes = 257', "max_nodes: Input should be less than or equal to"),
        ('method = "tree"\nacceptance = [0.1, 0.5]', "acceptance: must be shares in (0, 1]"),
        ('method = "chains"\nchains = 17', "chains: Input should be less than or equal to 16"),
        ('method = "lookup"\nmodel = "m"', "model: is an unknown key"),
        ('method = "forest"', "parts: is missing"),
        ('method = "forest"\nparts = 3', "parts: Input should be a valid"),
        ('method = "forest"\n[[parts]]\nmethod = "model"', "parts: Tuple should have at least 2"),
        (FOREST.replace("acceptance", "chance"), "parts[0].chance: is an unknown key"),
        (FOREST.replace('"model"', '"chains"'), "parts[1].method: 'chains' is unknown here"),
        (FOREST.replace("0.1]", "0.9]"), "parts[0].acceptance: must be shares"),
        (
            'method = "cascade"\n[inner.inner.inner.inner]\nmethod = "lookup"\n',
            "inner.inner.inner.inner: nested too deep, a recipe has at most 4 levels",
        ),
        (
            'method = "cascade"\n[inner.inner]\nmethod = "tree"\n[inner]\nmethod = "cascade"\n',
            "inner.inner.method: 'tree' is unknown here",
        ),
        (
            'method = "cascade"\nleniency = 2',
            "recipe: leniency needs certain = true: what is kept leniently does not follow",
        ),
        (
            'method = "cascade"\n[reviewer]\nstop = "confidence"',
            "reviewer: stop must be fixed: a reviewer drafts nothing by itself",
        ),
        (
            'method = "horizontal"\ntokens = [1, 2]\n[[parts]]\nmethod = "model"\n[[parts]]\n'
            'method = "lookup"',
            "recipe: tokens must have 1 numbers: one for each part but the last",
        ),
        ("method = " + "[" * 5000, "nested too deep"),
        ("method = tree", "Invalid value (at line 1, column 10)"),
        ('method = "tree"\nmethod = "model"\n', "(at line 2, column 17)"),
        ("#" * 70_000, "has more than 65536 bytes"),
    ],
)
def test_a_bad_file_is_refused_at_its_place(text: str, sentence: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(StartupError) as refused:
        read_recipe(path)
    assert str(path) in str(refused.value)
    assert sentence in str(refused.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match="recipe"):
        read_recipe(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('method = "forest"\n[[parts]]\nmethod = "magic"', "parts[0].method: 'magic' is unknown"),
        (
            None,
            f"is neither built in ({', '.join(METHODS)}), nor an installed package's method, nor a"
            " file: No such file",
        ),
    ],
)
def test_a_service_exits_with_2_and_one_line(
    text: str | None, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "none.toml" if text is None else written(tmp_path, text)
    line = refusal("drafter_svc", {"TANDEM_DRAFTER_RECIPE": str(path)})
    assert line.startswith("drafter: ")
    assert str(path) in line
    assert sentence in line


def test_a_built_in_recipes_keys_are_settings() -> None:
    settings = DrafterSettings(
        recipe="forest", max_nodes=6, acceptance=(0.5, 0.2), second_model="b", chains=3
    )
    recipe = recipe_of(settings)
    assert isinstance(recipe, ForestRecipe)
    first = recipe.parts[0]
    assert isinstance(first, TreeRecipe)
    assert (recipe.largest_tree, first.acceptance, recipe.parts[1].model) == (6, (0.5, 0.2), "b")
    chains: Any = built_in("chains", settings)
    assert (chains.chains, chains.largest_tree) == (3, 6)
    # METHOD is short for it; RECIPE is what counts.
    assert recipe_of(DrafterSettings(method="tree")) == built_in("tree", DrafterSettings())
    assert recipe_of(DrafterSettings(method="tree", recipe="model")).method == "model"


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_one_file_and_one_entry(name: str) -> None:
    kind = METHODS[name]
    assert kind.__module__ == kind.drafter.__module__
    assert kind.__module__.rpartition(".")[2] == name
    recipe = built_in(name, DrafterSettings())
    assert recipe.method == name
    scorers: Any = [  # which it only holds
        HeadTable(0, 0, zeros=False) if checkpoint.head else None
        for checkpoint in recipe.checkpoints
    ]
    drafter = recipe.make(scorers, Truncation(1.0, 0))
    assert type(drafter) is kind.drafter
    assert drafter.traits.largest_tree == recipe.largest_tree
    assert (drafter.traits.largest_tree > 0) == (drafter.traits.shape is not DraftShape.CHAIN)
    assert recipe_of(DrafterSettings(method=name)) == recipe_of(DrafterSettings(recipe=name))
    # No more is asked of other packages' methods.
    assert not fault_of(kind, name)
    assert not contradiction_of(recipe, drafter)


def test_methods_that_share_a_setting_share_its_values() -> None:
    found: dict[str, Any] = {}
    for recipe in METHODS.values():
        for setting, key in settings_of(recipe).values():
            own = setting, key.annotation, key.metadata, key.default
            assert found.setdefault(setting.name, own) == own


def test_a_method_that_does_not_exist_is_named_with_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TANDEM_DRAFTER_METHOD", "trees")
    with pytest.raises(StartupError, match=r"TANDEM_DRAFTER_METHOD: .*'model', 'tree', 'chains'"):
        read_settings(DrafterSettings)


def test_a_service_tells_its_recipe_without_places(
    random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    drafter, second = random_pair
    path = written(tmp_path, FOREST.replace("somewhere/second", str(second)))
    settings = DrafterSettings(model=str(drafter), recipe=str(path), max_length=64, max_sequences=2)
    loaded = load(settings)
    assert isinstance(loaded.drafter, ForestDrafter)
    told = json.loads(loaded.recipe)
    assert told["parts"][1]["model"] == second.name
    assert str(tmp_path) not in loaded.recipe
    assert str(drafter.parent) not in loaded.recipe
    assert loaded.info.max_nodes == 12
    assert loaded.info.parameters == sum(model.about.parameters for model in loaded.models)
    # Other weights of the same name draft otherwise: no replica.
    other = save_random_llama(tmp_path / second.name, 7)
    recipe = written(tmp_path, FOREST.replace("somewhere/second", str(other)))
    another = load(settings.model_copy(update={"recipe": str(recipe)}))
    assert another.recipe == loaded.recipe
    assert another.info.fingerprint != loaded.info.fingerprint


def test_models_of_different_vocabularies_do_not_make_a_forest(
    random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    other = save_random_llama(tmp_path / "other", 1, vocab_size=7)
    settings = DrafterSettings(
        model=str(random_pair[0]), second_model=str(other), recipe="forest", max_length=64
    )
    with pytest.raises(StartupError, match="drafter and other have 5 and 7 token ids"):
        load(settings)


@pytest.mark.parametrize("recipe", ["tree", "chains", "forest"])
def test_a_model_that_takes_no_trees_draws_no_branches(
    recipe: str, random_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "takes_trees", False)
    settings = DrafterSettings(model=str(random_pair[0]), recipe=recipe, max_length=64)
    with pytest.raises(StartupError, match=f"drafter cannot compute the branches of {recipe}"):
        load(settings)
    assert load(settings.model_copy(update={"recipe": "model"})).info.max_nodes == 0


@pytest.mark.parametrize("acceptance", [0.5, [], [[0.0]], [[]], [[0.1, 0.2]], [["a"]], [[1.5]]])
@pytest.mark.parametrize("name", ["medusa", "eagle"])
def test_acceptances_of_a_head_that_are_none_are_refused(name: str, acceptance: Any) -> None:
    head = HeadTable(0, 0, zeros=False, acceptance=acceptance)
    recipe = built_in(name, DrafterSettings())
    with pytest.raises(StartupError, match="must hold, for each depth, shares in"):
        recipe.make([head], Truncation(1.0, 0))


def test_acceptances_of_a_recipe_come_before_those_of_its_head() -> None:
    """Where neither says any, those of the method; deeper levels are like the last one."""
    head = HeadTable(0, 0, zeros=False, acceptance=((0.9,),))
    made = [
        MedusaRecipe(acceptance=own).make([scorer], Truncation(1.0, 0))._acceptance
        for own, scorer in (
            (((0.5, 0.2),), head),
            (None, head),
            (None, HeadTable(0, 0, zeros=False)),
        )
    ]
    assert made[:2] == [((0.5, 0.2),) * head.depths, ((0.9,),) * head.depths]
    assert len(made[2]) == head.depths
    assert made[2][0] == MedusaRecipe.unmeasured[0]
