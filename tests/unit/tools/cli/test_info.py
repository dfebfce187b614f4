"""What `tandem info` says of a drafter, with a model and without."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from drafter_svc.settings import DrafterSettings
from tandem.common.v1 import common_pb2
from tandem.drafting.choice.built_in import built_in
from tandem.drafting.methods import METHODS
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.cli.commands.info import _models
from tandem.tools.cli.display.recipe import shown

TARGET = common_pb2.ModelInfo(model="large", vocab_size=7, device="cuda", dtype="bfloat16")


def table(drafter: common_pb2.ModelInfo, *recipes: str) -> dict[str, list[str]]:
    reply = pb.GetModelInfoResponse(target=TARGET, drafter=drafter, drafter_recipes=recipes)
    return rows_of(reply)


def rows_of(reply: pb.GetModelInfoResponse) -> dict[str, list[str]]:
    """By a row's name, its cells."""
    console = Console(file=io.StringIO(), width=120)
    console.print(_models(reply))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split("│")[1:-1] for line in console.file.getvalue().splitlines()]
    rows = [[cell.strip() for cell in line] for line in lines if line]
    return {name: cells for name, *cells in rows}


def test_a_drafter_with_a_model() -> None:
    small = common_pb2.ModelInfo(
        model="small",
        vocab_size=7,
        parameters=9,
        device="cpu",
        dtype="float32",
        engine="openvino",
    )
    rows = table(small, '{"method":"tree","model":"","acceptance":[0.7,0.1],"max_nodes":8}')
    assert rows["model"] == ["large", "small"]
    assert rows["runs on"] == ["cuda, bfloat16", "cpu, float32, by openvino"]
    assert rows["recipe"] == ["", "tree (acceptance 0.7, 0.1; max_nodes 8)"]


def test_a_drafter_without_a_model() -> None:
    rows = table(common_pb2.ModelInfo(model="lookup", device="cpu"), '{"method":"lookup"}')
    assert [rows[name][1] for name in ("model", "parameters", "vocabulary", "runs on")] == [
        "none",
        "none",
        "the target's",
        "cpu",
    ]
    assert rows["tokenizer"] == ["none: prompts are token ids", "none: it drafts token ids"]
    assert rows["recipe"] == ["", "lookup"]


@pytest.mark.parametrize("version", [0, 3])
def test_weights_that_changed_have_their_version(version: int) -> None:
    rows = table(common_pb2.ModelInfo(model="small", parameters=9, weights_version=version))
    assert rows.get("weights") == (["", "version 3"] if version else None)


def test_a_target_that_drafts() -> None:
    recipe = '{"method":"lookup","ngram":3}'
    reply = pb.GetModelInfoResponse(target=TARGET, drafts_by_target=True, drafter_recipes=[recipe])
    assert rows_of(reply)["drafts inside"] == ["lookup (ngram 3)"]


def test_drafters_of_another_release_may_tell_no_recipe() -> None:
    small = common_pb2.ModelInfo(model="small", vocab_size=7, parameters=9)
    assert table(small)["recipe"] == ["", "unknown"]


@pytest.mark.parametrize("name", METHODS)
def test_a_recipe_begins_with_its_method(name: str) -> None:
    recipe = built_in(name, DrafterSettings(second_model="[red]")).model_dump_json()
    assert shown(recipe).startswith(name)


def test_parts_are_shown_as_recipes() -> None:
    recipe = built_in("forest", DrafterSettings(second_model="there/[red]", acceptance=(0.5,)))
    assert shown(recipe.model_dump_json()) == (
        "forest (parts tree (acceptance 0.5; max_nodes 16) + model (model \\[red]); max_nodes 16)"
    )
    cascade = built_in("cascade", DrafterSettings())
    assert shown(cascade.model_dump_json()) == (
        "cascade (reviewer model; inner lookup (ngram 3; window 4096);"
        " rule block; tokens 4; cut fixed; certain False; leniency 1.0)"
    )
    assert shown("no json") == "no json"
