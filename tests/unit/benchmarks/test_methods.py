"""The rows of the benchmark of methods, and how texts are counted."""

from __future__ import annotations

import pytest

from benchmarks.methods.published import Measured
from benchmarks.methods.rows import METHODS as ROWS
from drafter_svc.settings import DrafterSettings
from models.sampling import until_it_loops
from tandem.drafting.choice.built_in import built_in
from tandem.drafting.methods import METHODS
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.verification import LOSSY_VERIFIERS, VERIFIERS
from target_svc.settings import TargetSettings


def test_every_method_and_rule_has_a_row() -> None:
    assert {row.recipe for row in ROWS.values()} == set(METHODS)
    # Pure methods' own rule keeps the lengths that `block` keeps, a token less.
    rules = {row.rule for row in ROWS.values()}
    assert rules == {*VERIFIERS, *LOSSY_VERIFIERS} - {"greedy_block"}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_names_settings_that_there_are(name: str) -> None:
    row = ROWS[name]
    drafter = {key.lower(): value for key, value in row.drafter.items()}
    assert drafter.keys() <= DrafterSettings.model_fields.keys()
    assert {key.lower() for key in row.target} <= TargetSettings.model_fields.keys()
    recipe = built_in(row.recipe, DrafterSettings.model_validate(drafter))
    assert bool(row.nodes) == (recipe.largest_tree > 0)
    assert row.nodes <= max(recipe.largest_tree, 16)


def test_a_text_is_counted_until_it_loops() -> None:
    loop = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert until_it_loops([0, *loop * 5]) == 1 + 2 * 9 + 8
    assert until_it_loops(list(range(100))) == 100
    assert until_it_loops([]) == 0


def test_a_way_to_draft_stands_beside_plain_decoding_of_its_turns() -> None:
    plain, drafted = Measured("plain", 0, 1.0), Measured("drafter", None, 1.0)
    for seconds in (1.0, 2.0):
        plain.add(seconds, [pb.Summary(new_tokens=96, rounds=96)])
        own = pb.Summary(new_tokens=96, rounds=39, drafted_tokens=100, accepted_tokens=57)
        drafted.add(seconds / 2, [own])
    row = drafted.row(plain)
    assert (row["draft"], row["accepted"], row["tokens a round"]) == ("chosen", 0.57, 2.5)
    assert (row["over plain"], row["range"]) == (2.0, "2.00 to 2.00")
    assert plain.row(plain)["accepted"] is None
