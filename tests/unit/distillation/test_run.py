"""Runs: they learn, go on where they were cut, and lose nothing when something fails."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, modeling_utils

from tandem.distillation import divergences, drafters, run, trainer
from tandem.distillation.held_out import Figures, HeldOut
from tandem.distillation.plan import Distillation
from tandem.distillation.run import TrainingProgress, distill
from tandem.errors import EngineFailure, StartupError
from tandem.whole_files import alone
from tests.support.distilling import save_spelling

_CELLS = pytest.mark.campaign(
    "each divergence and each kind of text trains", "two of them, and divergences by themselves"
)
_FILES = pytest.mark.campaign("a full disk at rarer files", "the two largest files")
_RARER = ("best", "README", "history")
_MOMENTS = pytest.mark.campaign("a cut at rarer moments", "three moments")


class Cut(BaseException):
    """As kill -9: nothing is tidied up after it, beyond what Python does."""


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("divergence", "data"),
    [
        ("tvd", "mixed"),
        ("cross-entropy", "target"),
        *(
            pytest.param(*cell, marks=_CELLS)
            for cell in (("forward-kl", "corpus"), ("jsd", "target"), ("reverse-kl", "on-policy"))
        ),
    ],
)
def test_a_drafter_comes_nearer_to_its_target(
    divergence: Any, data: Any, plan: Distillation, tmp_path: Path
) -> None:
    own = replace(plan, divergence=divergence, data=data, steps=20, measure_every=10, rate=5e-3)
    outcome = distill(own, tmp_path / "out")
    best, first = (
        sum(figures[kind].summary()["overlap"] for kind in ("text", "target"))
        for figures in (outcome.best, outcome.first)
    )
    assert best > first
    assert outcome.best_step in (10, 20)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| divergence | {divergence} |" in card
    assert "20 steps, 960 tokens" in card
    assert load_file(str(tmp_path / "out" / "model.safetensors"))
    history = json.loads((tmp_path / "out" / "run" / "history.json").read_text())
    assert [step for step, *_ in history["history"]] == [0, 10, 20]


@pytest.fixture(scope="module")
def whole(plan: Distillation, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a run that nobody cut."""
    output = tmp_path_factory.mktemp("whole") / "out"
    distill(plan, output)
    return weights(output)


def cut_in(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, at: int) -> None:
    """Cut at a call of a function: before it, and the next time after it."""
    real, calls = getattr(place, name), [0]

    def cutting(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise Cut
        found = real(*args, **options)
        if calls[0] == at + 2:
            raise Cut
        return found

    monkeypatch.setattr(place, name, cutting)


@pytest.mark.parametrize(
    ("place", "name", "at"),
    [
        (trainer.Training, "take", 4),
        (run._Run, "_keep_best", 2),
        (torch, "save", 4),
        *(
            pytest.param(*moment, marks=_MOMENTS)
            for moment in (
                (trainer.Training, "take", 1),
                (trainer.Training, "save", 1),
                (trainer.Training, "save", 3),
                (run, "write_drafter", 2),
                (run._Run, "_forget_worse", 1),
                (run._Run, "_write", 3),
                (shutil, "rmtree", 4),
                (torch, "save", 2),
            )
        ),
    ],
)
def test_a_run_that_is_cut_at_any_moment_ends_with_the_same_bytes(
    place: Any,
    name: str,
    at: int,
    plan: Distillation,
    whole: bytes,
    tmp_path: Path,
) -> None:
    cuts = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "_SAVE_SECONDS", 0.0)
        cut_in(patch, place, name, at)
        for _ in range(9):
            try:
                distill(plan, tmp_path / "out")
                break
            except Cut:
                cuts += 1
    assert 1 <= cuts <= 2
    assert weights(tmp_path / "out") == whole


def test_a_cut_in_the_target_s_texts_is_none(
    plan: Distillation, whole: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def progress(now: TrainingProgress) -> None:
        asked.append(now.step)
        if now.step in (2, 3) and asked.count(now.step) == 1:
            raise Cut

    for _ in range(2):
        with pytest.raises(Cut):
            distill(plan, tmp_path / "out", progress=progress)
        for text in (tmp_path / "out" / "run" / "texts").rglob("00.safetensors"):
            text.unlink()
            text.with_suffix(".new").write_bytes(b"half")
    said: list[str] = []
    distill(plan, tmp_path / "out", progress=progress, say=said.append)
    assert said[0] == "it goes on after step 2"
    assert "the target has written 8 of its next 16 texts" in said
    assert weights(tmp_path / "out") == whole


def test_a_run_that_ended_is_not_trained_again(plan: Distillation, tmp_path: Path) -> None:
    output = tmp_path / "out"
    one = distill(plan, output)
    before = weights(output)
    steps: list[int] = []
    other = distill(plan, output, progress=lambda now: steps.append(now.step))
    assert not steps
    assert weights(output) == before
    assert other.best == one.best
    assert other.tokens_a_round == one.tokens_a_round


def test_a_loss_that_is_not_finite_keeps_the_last_good_step(
    plan: Distillation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = divergences.loss

    def spoilt(*args: Any) -> Any:
        spoilt.calls += 1  # type: ignore[attr-defined]
        return real(*args) * (float("nan") if spoilt.calls == 4 else 1.0)  # type: ignore[attr-defined]

    spoilt.calls = 0  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "loss", spoilt)
        with pytest.raises(EngineFailure, match=r"step 3 is not finite.*smaller rate"):
            distill(replace(plan, data="corpus"), tmp_path / "out")
    state = torch.load(tmp_path / "out" / "run" / "checkpoint.pt", weights_only=True)
    assert state["step"] == 2
    assert all(bool(each.isfinite().all()) for each in state["model"].values())
    assert load_file(str(tmp_path / "out" / "model.safetensors"))


@pytest.mark.parametrize(
    "written",
    ["checkpoint", "model", *(pytest.param(name, marks=_FILES) for name in _RARER)],
)
def test_a_full_disk_keeps_what_was_there(
    written: str, plan: Distillation, whole: bytes, tmp_path: Path
) -> None:
    """Each library says in its own error that there is no room, and leaves half a file."""
    output = tmp_path / "out"
    full = False

    def without_room(real: Any, path_of: Any, error: Exception) -> Any:
        def write(*args: Any, **options: Any) -> Any:
            path = Path(path_of(*args[:2]))
            if full and path.name.startswith(written):
                path.write_bytes(b"half")
                raise error
            return real(*args, **options)

        return write

    def fill(now: TrainingProgress) -> None:
        nonlocal full
        full = now.step >= 3

    says = "No space left on device"
    with pytest.MonkeyPatch.context() as patch:
        for place, name, path_of, error in (
            (torch, "save", lambda state, path: path, RuntimeError(says)),
            (
                modeling_utils,
                "safe_save_file",
                lambda found, path, **_: path,
                SafetensorError(says),
            ),
            (Path, "write_text", lambda path, text: path, OSError(errno.ENOSPC, says)),
        ):
            patch.setattr(place, name, without_room(getattr(place, name), path_of, error))
        with pytest.raises(OSError, match=says):
            distill(plan, output, progress=fill)
    assert load_file(str(output / "model.safetensors"))
    assert not [*(output / "run").glob("new"), *(output / "run").glob("*.new")]
    distill(plan, output)
    assert weights(output) == whole


def test_a_checkpoint_that_cannot_be_read_is_named(plan: Distillation, tmp_path: Path) -> None:
    distill(replace(plan, steps=1), tmp_path / "out")
    (tmp_path / "out" / "run" / "checkpoint.pt").write_bytes(b"half")
    with pytest.raises(StartupError, match=r"checkpoint.pt cannot be read .*remove it"):
        distill(plan, tmp_path / "out")


def test_a_folder_of_something_else_is_left_alone(plan: Distillation, tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(StartupError, match="has files that are of no run"):
        distill(plan, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


def test_a_run_goes_on_longer_and_not_otherwise(plan: Distillation, tmp_path: Path) -> None:
    distill(replace(plan, steps=2), tmp_path / "out")
    assert distill(replace(plan, steps=4), tmp_path / "out").steps == 4
    with pytest.raises(StartupError, match="divergence was 'tvd' and is 'jsd'; seed was"):
        distill(replace(plan, divergence="jsd", seed=1), tmp_path / "out")


def test_minutes_end_a_run_too(plan: Distillation, tmp_path: Path) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 6.0
        return now

    outcome = distill(replace(plan, steps=0, minutes=0.5), tmp_path / "out", clock=clock)
    assert outcome.steps == 5
    assert outcome.seconds == 30.0


def test_a_pair_of_other_tokenizers_is_refused(plan: Distillation, tmp_path: Path) -> None:
    other = save_spelling(tmp_path / "other", 3)
    file = json.loads((other / "tokenizer.json").read_text())
    vocabulary = file["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(file))
    with pytest.raises(StartupError, match="tokenizers of target and drafter differ: id 5"):
        distill(replace(plan, drafter=str(other)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"divergence": "kl"}, "divergence: 'kl' is none of forward-kl, "),
        ({"data": "web"}, "data: 'web' is none of corpus, "),
        ({"divergence": "cross-entropy", "data": "mixed"}, "its own teach it nothing|teach it"),
        ({"drafter": ""}, "give the drafter's directory, or layers and width"),
        ({"layers": 2}, "give the drafter's directory, or layers and width"),
        ({"drafter": "", "layers": 2}, "a fresh drafter needs layers and width"),
        ({"drafter": "", "layers": 2, "width": 40}, "width must be a multiple of 32"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"length": 4}, "length must be at least 8"),
        ({"length": 512}, "the drafter holds 512 tokens: give a smaller length"),
        ({"rate": float("nan")}, "rate must be positive"),
        ({"steps": 0, "minutes": 0.0}, "minutes must be positive"),
        ({"drafter": "/nowhere"}, "cannot read the tokenizer of /nowhere"),
        ({"target": "/nowhere"}, "cannot read the tokenizer of /nowhere"),
        ({"prompts": "/nowhere"}, "cannot read /nowhere"),
    ],
)
def test_a_plan_that_cannot_work_costs_nothing(
    changes: Any, says: str, plan: Distillation, tmp_path: Path
) -> None:
    with pytest.raises(StartupError, match=says):
        distill(replace(plan, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_weights_is_refused(plan: Distillation, tmp_path: Path) -> None:
    shutil.copytree(plan.drafter, tmp_path / "empty")
    (tmp_path / "empty" / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="cannot read the model"):
        distill(replace(plan, drafter=str(tmp_path / "empty")), tmp_path / "out")


def test_a_fresh_drafter_begins_with_its_targets_embedding(plan: Distillation) -> None:
    drafter = drafters.fresh_drafter(plan.target, 2, 32, 0)
    assert drafter.config.num_hidden_layers == 2
    assert drafter.config.vocab_size == 2048
    theirs, ours = (
        each.get_input_embeddings().weight.detach().float()
        for each in (drafters.read_model(plan.target, torch.float32, torch.device("cpu")), drafter)
    )
    centred = theirs - theirs.mean(0)
    ratio = torch.pdist(centred[:50]) / torch.pdist(ours[:50])
    assert ratio.max() / ratio.min() == pytest.approx(1.0, abs=1e-2)


def test_a_fresh_drafter_is_made_in_a_run(plan: Distillation, tmp_path: Path) -> None:
    own = replace(plan, drafter="", layers=1, width=64, rate=1e-2)
    outcome = distill(own, tmp_path / "out")
    assert outcome.steps == 6
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["hidden_size"], config["dtype"]) == (64, "bfloat16")
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_smaller_rate_goes_on_behind_a_loss_that_was_not_finite(
    plan: Distillation, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "loss", lambda *args: divergences.loss(*args) * float("nan"))
        with pytest.raises(EngineFailure):
            distill(plan, tmp_path / "out")
    assert distill(replace(plan, rate=1e-4), tmp_path / "out").steps == 6


def test_a_measurement_that_is_not_a_number_is_never_the_best(
    plan: Distillation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, calls = HeldOut.measure, [0]

    def measure(held: HeldOut, drafter: Any) -> Any:
        calls[0] += 1
        found = real(held, drafter)
        spoilt = {kind: Figures([float("nan")], [0.0]) for kind in found}
        return spoilt if calls[0] == 2 else found

    monkeypatch.setattr(HeldOut, "measure", measure)
    assert distill(replace(plan, rate=5e-3), tmp_path / "out").best_step in (4, 6)


def test_texts_that_changed_are_another_run(plan: Distillation, tmp_path: Path) -> None:
    own = replace(plan, steps=1, prompts=str(shutil.copy(plan.prompts, tmp_path)))
    distill(own, tmp_path / "out")
    with Path(own.prompts).open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(StartupError, match="has another plan: prompts_sha256 was"):
        distill(own, tmp_path / "out")


def test_two_runs_do_not_share_a_folder(plan: Distillation, tmp_path: Path) -> None:
    with (
        alone(tmp_path / "out" / "run"),
        pytest.raises(StartupError, match="another process is at"),
    ):
        distill(plan, tmp_path / "out")


def test_embeddings_and_heads_are_no_matrices_of_layers() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=7, n_positions=9, n_embd=8, n_layer=1, n_head=2))
    adam, muon = trainer.optimisers(model, 1e-3)
    shapes = [tuple(weight.shape) for weight in muon.param_groups[0]["params"]]
    assert (7, 8) not in shapes
    assert (9, 8) not in shapes
    assert len(shapes) == 4
    assert sum(len(each.param_groups[0]["params"]) for each in (adam, muon)) == len(
        list(model.parameters())
    )
