"""What a trainer learns, what it offers, and what it does not."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.distillation.divergences import tvd
from tandem.distillation.teachers import continue_rows
from tandem.errors import EngineFailure
from tandem.inference.loading.learnt_weights import load_weights
from tandem.online import training
from tandem.online.holdout import Holdout
from tandem.online.home import home_texts
from tandem.online.kept_text import TOP, KeptText
from tandem.online.learner import LENGTH, TEXTS, Learner, windows_of
from tandem.online.replay import Replay
from tandem.online.training import HeldOutComparison, OnlineTraining
from tests.support.models.tiny import random_llama

VOCAB_SIZE = 64
_PROMPT, _TOKENS = 4, 28


def texts_of(
    writer: Any, count: int, seed: int, teller: Any = None, mass: int = 0
) -> list[KeptText]:
    """Texts that a target writes, with its rows; or with those of another model."""
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(count, _PROMPT + _TOKENS, dtype=torch.int64)
    tokens[:, :_PROMPT] = torch.randint(VOCAB_SIZE, (count, _PROMPT), generator=generator)
    known = torch.full((count,), _PROMPT)
    written = continue_rows(writer, tokens, known, VOCAB_SIZE, generator)
    with torch.no_grad():
        logits = (teller or writer)(input_ids=written, use_cache=False).logits
    values, ids = logits.topk(TOP)
    weights = ((values - values[..., :1]).exp() * 65535).round()
    rows = [(ids[one].numpy(), weights[one].numpy()) for one in range(count)]
    places = np.arange(_PROMPT - 1, _PROMPT + _TOKENS - 1, dtype=np.int32)
    return [
        KeptText(
            written[one].numpy().astype(np.uint32),
            places,
            ids_[places].astype(np.uint32),
            weights_[places].astype(np.uint16),
            np.arange(len(places)) % 3 == one % 3,
            np.full(len(places), mass, np.uint16),
            Holdout().takes(written[one].numpy().astype(np.uint32)),
        )
        for one, (ids_, weights_) in enumerate(rows)
    ]


@pytest.fixture(scope="module")
def target() -> Any:
    return random_llama(1, VOCAB_SIZE).eval()


@pytest.fixture(scope="module")
def drafter(target: Any) -> Any:
    """Near its target, as one that was trained on other texts."""
    found = copy.deepcopy(target)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in found.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * 0.1)
    return found


@pytest.fixture(scope="module")
def home(drafter: Any, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    kept = tmp_path_factory.mktemp("home") / "home.safetensors"
    found = home_texts("", "", drafter, LENGTH, kept)
    assert torch.equal(home_texts("", "", drafter, LENGTH, kept), found)
    return found[::8, :33]


class Trainer:
    """A training that is driven round by round."""

    def __init__(self, drafter: Any, home: torch.Tensor, folder: Path) -> None:
        self.replay = Replay(folder / "replay", 1 << 24, 3600)
        self.learner = Learner(copy.deepcopy(drafter), copy.deepcopy(drafter), home)
        self.said: list[dict[str, Any]] = []
        self.idle = 0
        self.folder = folder

        def idle() -> None:
            self.idle += 1

        self.training = OnlineTraining(
            self.learner, self.replay, folder / "offers", self.said.append, lambda: None, idle
        )

    def keep(self, texts: Sequence[KeptText]) -> None:
        for at in range(0, len(texts), 8):
            self.replay.add(texts[at : at + 8])


@pytest.fixture
def trainer(drafter: Any, home: torch.Tensor, tmp_path: Path) -> Trainer:
    return Trainer(drafter, home, tmp_path)


@torch.no_grad()
def overlap(model: Any, target: Any, texts: Sequence[KeptText]) -> float:
    tokens = torch.from_numpy(np.stack([text.token_ids for text in texts]).astype(np.int64))
    p, q = (
        one(input_ids=tokens, use_cache=False).logits.log_softmax(-1) for one in (target, model)
    )
    return float((1 - tvd(p, q)).mean())


def test_it_learns_what_the_target_says(trainer: Trainer, drafter: Any, target: Any) -> None:
    trainer.keep(texts_of(target, 160, 1))
    fresh = texts_of(target, 32, 2)
    before = overlap(drafter, target, fresh)
    for _ in range(4):
        trainer.training.round()
    offers = [told["offer"] for told in trainer.said if "offer" in told]
    assert offers
    better = copy.deepcopy(drafter)
    load_weights(better, trainer.folder / "offers" / offers[-1])
    assert overlap(better, target, fresh) > before + 0.03
    assert trainer.said[0]["measured"]["served"] == pytest.approx(before, abs=0.05)
    # What was offered is what is compared with from then on.
    first, *rest = [told["measured"] for told in trainer.said]
    assert rest[0]["served"] == pytest.approx(first["trained"], abs=1e-6)


def test_rows_of_another_model_are_turned_down(trainer: Trainer, target: Any) -> None:
    """The texts are the target's. What the rows say of them is learnt, and is no good."""
    trainer.keep(texts_of(target, 160, 1, teller=random_llama(9, VOCAB_SIZE).eval()))
    for _ in range(3):
        trainer.training.round()
    assert [told["fault"] for told in trainer.said if "offer" in told] == []
    assert {told["fault"] for told in trainer.said} == {"the target's rows do not say what came"}


def test_rows_are_believed_of_a_drafter_that_is_surer_than_its_target(target: Any) -> None:
    """Also where rows say their mass, of which such a drafter has more."""
    surer = copy.deepcopy(target)
    with torch.no_grad():
        surer.lm_head.weight.mul_(1.3)
    few = 8
    for mass in (False, True):
        texts = []
        for text in texts_of(target, 64, 1):
            weights = np.where(np.arange(TOP) < few, text.weights, 0).astype(np.uint16)
            share = weights.sum(1) / text.weights.sum(1)  # all of its tokens are told
            masses = (share * 65535).round().astype(np.uint16) if mass else text.masses
            texts.append(replace(text, weights=weights, masses=masses))
        learner = Learner(copy.deepcopy(surer), surer, torch.zeros(8, 33, dtype=torch.int64))
        found = learner.measured(texts, served=True).unsaid.mean()
        assert found < -0.01


def test_texts_that_are_held_out_are_never_learnt_from(trainer: Trainer, target: Any) -> None:
    trainer.keep(texts_of(target, 160, 1))
    learnt: list[KeptText] = []
    step = trainer.learner.step

    def noted(texts: Sequence[KeptText], generator: np.random.Generator) -> float:
        learnt.extend(texts)
        return step(texts, generator)

    trainer.learner.step = noted  # type: ignore[method-assign]
    trainer.training.round()
    assert len(learnt) == 25 * TEXTS
    assert not any(text.held_out for text in learnt)


def test_texts_with_more_rejected_places_are_learnt_from_more_often(
    trainer: Trainer, target: Any
) -> None:
    texts = [
        replace(text, rejected=np.full(len(text.places), number % 2 == 0))
        for number, text in enumerate(texts_of(target, 160, 1))
    ]
    trainer.keep(texts)
    trainer.training._look()
    drawn = Counter(bool(text.rejected[0]) for _ in range(50) for text in trainer.training._drawn())
    assert drawn[True] > 10 * drawn[False] > 0


def test_it_waits_for_texts(trainer: Trainer, target: Any) -> None:
    trainer.training.round()
    trainer.keep(texts_of(target, 8, 1))
    trainer.training.round()
    assert (trainer.idle, trainer.said, trainer.learner.steps) == (2, [], 0)


def test_files_may_go_at_any_moment(trainer: Trainer, target: Any) -> None:
    trainer.keep(texts_of(target, 160, 1))
    trainer.training._look()
    trainer.replay.clear()
    trainer.training._read.cache_clear()
    assert trainer.training._drawn() == []
    trainer.training._measure()
    trainer.training.round()
    assert (trainer.idle, trainer.said) == (1, [])


def test_a_loss_that_is_not_finite_begins_again(trainer: Trainer, target: Any) -> None:
    trainer.keep(texts_of(target, 160, 1))
    trainer.training.round()
    with torch.no_grad():
        next(trainer.learner.model.parameters())[0, 0] = torch.nan
    trainer.said.clear()
    trainer.training.round()
    assert "not finite" in trainer.said[0]["problem"]
    assert np.isfinite(trainer.said[-1]["measured"]["trained"])


def test_what_gains_nothing_begins_again(
    trainer: Trainer, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_LEAST_GAIN", 1.0)
    monkeypatch.setattr(training, "_PATIENCE", 2)
    monkeypatch.setattr(training, "_MEASURE_EVERY", 5)
    trainer.keep(texts_of(target, 160, 1))
    steps: list[int] = []
    begun: list[int] = []
    begin = trainer.learner.begin_again

    def noted() -> None:
        begun.append(len(steps) + 1)
        begin()

    trainer.learner.begin_again = noted  # type: ignore[method-assign]
    for _ in range(5):
        trainer.training.round()
        steps.append(trainer.learner.steps)
    assert steps == [5, 10, 15, 20, 25]
    # Each second time from what is served.
    assert begun == [2, 4]


def test_a_step_that_fails_leaves_the_weights(drafter: Any, home: torch.Tensor) -> None:
    learner = Learner(copy.deepcopy(drafter), copy.deepcopy(drafter), home)
    with torch.no_grad():
        learner.model.lm_head.weight[0, 0] = torch.inf
    text = texts_of(drafter, 1, 1)
    with pytest.raises(EngineFailure):
        learner.step(text, np.random.default_rng(0))
    learner.begin_again()
    for own, first in zip(learner.model.parameters(), drafter.parameters(), strict=True):
        assert torch.equal(own, first)


GOOD = HeldOutComparison(served=0.6, trained=0.62, error=0.005, unsaid=-0.2, home=0.01, steps=25)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, ""),
        ({"trained": 0.602}, "nothing gained"),
        ({"error": 0.011}, "nothing gained"),
        ({"trained": float("nan")}, "nothing gained"),
        ({"unsaid": 0.0}, "the target's rows do not say what came"),
        ({"unsaid": float("nan")}, "the target's rows do not say what came"),
        ({"home": 0.1}, "home texts are forgotten"),
        ({"home": float("nan")}, "home texts are forgotten"),
    ],
)
def test_what_is_offered_gains_and_forgets_nothing(changed: dict[str, Any], fault: str) -> None:
    assert replace(GOOD, **changed).fault == fault


def test_ids_that_the_drafter_does_not_have_are_read_as_it_reads_them(
    trainer: Trainer, target: Any
) -> None:
    """A target may pad its vocabulary further."""
    texts = texts_of(target, 8, 1)
    for text in texts:
        text.token_ids[10] = VOCAB_SIZE + 7
        text.ids[12, 3] = VOCAB_SIZE + 9
    windows = windows_of(texts, VOCAB_SIZE, 32, np.random.default_rng(0))
    assert int(windows.tokens.max()) == VOCAB_SIZE - 1
    assert int(windows.following.max()) < VOCAB_SIZE
    assert len(windows.at) == 8 * (_TOKENS - 1)
    assert np.isfinite(trainer.learner.step(texts, np.random.default_rng(0)))
    assert np.isfinite(trainer.learner.measured(texts).unsaid).all()


def test_a_row_leaves_to_other_tokens_what_its_mass_does_not_have(
    trainer: Trainer, drafter: Any, target: Any
) -> None:
    """Of a target that does not say it, what the checkpoint leaves to them."""
    few = 3
    for mass in (0, 50000):
        texts = [
            replace(text, weights=np.where(np.arange(TOP) < few, text.weights, 0).astype(np.uint16))
            for text in texts_of(target, 4, 1, mass=mass)
        ]
        windows = windows_of(texts, VOCAB_SIZE, 32, np.random.default_rng(0))
        said = trainer.learner._with_rest(windows)
        expected = torch.full((len(windows.at),), mass / 65535)
        if not mass:
            with torch.no_grad():
                own = drafter(input_ids=windows.tokens[:, :-1], use_cache=False).logits.softmax(-1)
            assert said.ids is not None
            rows, places = windows.at.T
            expected = own[rows, places].gather(-1, said.ids[:, :few]).sum(-1).clamp(min=0.1)
        assert torch.allclose(said.log_probs.exp()[:, :few].sum(-1), expected, atol=1e-5)


def test_a_window_has_the_rows_of_its_own_places() -> None:
    """Of a text that is longer than a window; a row says the token after its place."""
    count = 3 * LENGTH
    places = np.arange(0, count - 1, 5, dtype=np.int32)
    tokens = np.random.default_rng(0).integers(1, 1000, count).astype(np.uint32)
    ids = np.zeros((len(places), TOP), np.uint32)
    ids[:, 0] = tokens[places + 1]
    weights = np.zeros((len(places), TOP), np.uint16)
    weights[:, 0] = 9
    nothing = np.zeros(len(places), np.uint16)
    text = KeptText(tokens, places, ids, weights, nothing.astype(np.bool_), nothing)
    windows = windows_of([text] * 20, 1000, LENGTH, np.random.default_rng(1))
    assert windows.tokens.shape == (20, LENGTH + 1)
    rows, at = windows.at.T
    following = windows.tokens[rows, at + 1]
    assert torch.equal(following, windows.following)
    assert windows.told.said.ids is not None
    assert torch.equal(following, windows.told.said.ids[:, 0])
    assert torch.equal(windows.told.said.log_probs[:, 0], torch.zeros(len(rows)))
    assert len(set(windows.tokens[:, 0].tolist())) > 10  # windows begin at many places
