"""The search finds the sublayers that nobody misses, and an interrupted one continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from models.zoo import skip_search
from models.zoo.skip_search import Decoding, Found, names_of, part_of
from tandem.inference.loading.partial import ModelPart, read_skipped
from tests.support.models.architectures import LLAMA, build

LAYERS = 6
FREE = {"attention 1", "mlp 1", "attention 2", "mlp 4", "attention 4"}


class Pretended:
    """A model in which some sublayers are free, by formulas."""

    layers = LAYERS

    def __init__(self) -> None:
        self.asked: list[set[str]] = []

    def measure(self, part: ModelPart) -> Found:
        skipped = read_skipped(part.skip)
        out = {f"attention {i}" for i in skipped.attention} | {f"mlp {i}" for i in skipped.mlp}
        self.asked.append(out)
        overlap, step = 0.6 ** len(out - FREE), 1 - len(out) / (2 * LAYERS)
        tokens = sum(overlap**i for i in range(5))
        return Found(tokens / (4 * step + 1), overlap, step, tokens)


def study_in(folder: Path) -> optuna.Study:
    return optuna.create_study(
        study_name="a",
        storage=JournalStorage(JournalFileBackend(str(folder / "journal"))),
        sampler=optuna.samplers.TPESampler(seed=1),
        direction="maximize",
        load_if_exists=True,
    )


@pytest.fixture(autouse=True)
def quiet() -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def test_the_free_sublayers_are_found_without_being_told(tmp_path: Path) -> None:
    model = Pretended()
    search: Any = skip_search.search
    search(model, study_in(tmp_path), 20, 10.0, tmp_path / "part.json")
    assert [set(one) for one in model.asked[: 2 * LAYERS]] == [{name} for name in names_of(LAYERS)]
    best = max(
        (trial for trial in study_in(tmp_path).trials if trial.value), key=lambda t: t.value or 0
    )
    assert set(skip_search.out_of(best)) == FREE
    told = skip_search.told(best)
    assert (told["attention"], told["mlp"], told["overlap"]) == ([1, 2, 4], [1, 4], 1.0)


def test_an_interrupted_search_continues(tmp_path: Path) -> None:
    search: Any = skip_search.search
    first, second = Pretended(), Pretended()
    search(first, study_in(tmp_path), 5, 10.0, tmp_path / "part.json")
    search(second, study_in(tmp_path), 14, 10.0, tmp_path / "part.json")
    assert len(first.asked) == 5
    assert len(second.asked) == 9
    assert not [one for one in second.asked if one in first.asked]
    # No time left: nothing more is tried.
    search(second, study_in(tmp_path), 99, 0.0, tmp_path / "part.json")
    assert len(second.asked) == 9


def test_a_search_that_is_interrupted_within_a_trial_continues(tmp_path: Path) -> None:
    search: Any = skip_search.search
    model = Pretended()
    measure = model.measure

    def interrupted(part: ModelPart) -> Found:
        if len(model.asked) == 3:
            model.asked.append(set())
            raise KeyboardInterrupt
        return measure(part)

    model.measure = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        search(model, study_in(tmp_path), 20, 10.0, tmp_path / "part.json")
    # And by a kill: a trial that never ends.
    study_in(tmp_path).ask()
    search(model, study_in(tmp_path), 20, 10.0, tmp_path / "part.json")
    assert {frozenset(one) for one in model.asked} >= {frozenset({n}) for n in names_of(LAYERS)}
    best = skip_search.best_of(
        [skip_search.told(t) for t in skip_search.complete(study_in(tmp_path))]
    )
    assert (best["attention"], best["mlp"]) == ([1, 2, 4], [1, 4])


def test_a_lucky_trial_of_a_set_is_not_the_best() -> None:
    def trial(mlp: int, gain: float) -> dict[str, Any]:
        return {
            "attention": [],
            "mlp": [mlp],
            "gain": gain,
            "overlap": 1.0,
            "step": 1.0,
            "tokens": 1.0,
        }

    trials = [trial(1, 9.0), trial(1, 0.7), trial(1, 0.8), trial(2, 0.9)]
    assert skip_search.best_of(trials)["mlp"] == [2]
    assert skip_search.best_of(trials[:3])["gain"] == 0.8


def test_what_adds_nothing_is_not_missed(tmp_path: Path) -> None:
    """On a model: a layer that writes zeros has overlap 1, another one has less."""
    model = build(LLAMA, num_hidden_layers=3)
    with torch.no_grad():
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            for parameter in model.get_submodule(f"model.layers.1.{part}").parameters():
                parameter.zero_()
    decoding = Decoding(model, [[1, 2, 3, 4, 5, 6, 7, 8]])
    free = decoding.measure(part_of(["attention 1", "mlp 1"], tmp_path / "part.json"))
    assert free.overlap == pytest.approx(1, abs=1e-4)
    assert free.tokens == 5
    missed = decoding.measure(part_of(["mlp 0"], tmp_path / "part.json"))
    assert missed.overlap < 0.9
    assert json.loads((tmp_path / "part.json").read_text()) == {"attention": [], "mlp": [0]}
