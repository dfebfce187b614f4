"""What trains a head is what serves it; what it learns, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from tandem.distillation.divergences import TargetRows, tvd
from tandem.errors import StartupError
from tandem.inference.feed import Feed
from tandem.inference.heads.head import Head
from tandem.inference.heads.medusa import MedusaHead
from tandem.inference.loading.learnt_weights import LearntWeights, load_weights
from tandem.online.heads.home import head_home, told_texts
from tandem.online.heads.learner import HeadLearner
from tandem.online.heads.roots import roots_of, states_of
from tandem.online.kept_text import TOP, KeptText
from tandem.online.replay import Replay
from tandem.online.training import OnlineTraining
from tests.support.models.heads import (
    HEADS,
    MTP,
    blank_head,
    eagle_config,
    random_eagle_3,
    random_head,
)
from tests.support.models.tiny import noisy, random_llama
from tests.unit.inference.heads.test_eagle import eagle, head_of
from tests.unit.online.test_training import VOCAB_SIZE, texts_of

# Methods, and whether a head has no decoder layer.
PLAIN = [("medusa", True), ("hydra", True)]
REMEMBERING = [("eagle", False), ("hydra", False), (MTP, False)]
WIDTH, LAYERS = 16, 1
# Of an EAGLE-3 head.
OWN_IDS = range(VOCAB_SIZE)


@pytest.fixture(scope="module")
def target() -> Any:
    return random_llama(1, VOCAB_SIZE).eval()


def heard(
    target: Any,
    count: int,
    seed: int,
    teller: Any = None,
    layers: tuple[int, ...] = (LAYERS + 1,),
) -> list[KeptText]:
    """Texts as a head hears them, with states of the target's layers; one of four is held out. Rows
    may be those of another model."""
    written = texts_of(target, count, seed, teller, mass=65535)
    tokens = torch.from_numpy(np.stack([text.token_ids for text in written]).astype(np.int64))
    told = told_texts(target, tokens, written[0].places.tolist(), layers)
    return [
        replace(text, states=own.states, held_out=number % 4 == 0)
        for number, (text, own) in enumerate(zip(written, told, strict=True))
    ]


@pytest.fixture(scope="module")
def texts(target: Any) -> list[KeptText]:
    return heard(target, 48, 1)


def training_of(head: Head, texts: Sequence[KeptText], folder: Path) -> Any:
    """A training of its checkpoint's weights, and what it says."""
    said: list[dict[str, Any]] = []
    replay = Replay(folder / "replay", 1 << 24, 3600)
    replay.add(texts)
    learner = HeadLearner(head, head.trained(), ())

    def nothing() -> None:
        pass

    made = OnlineTraining(learner, replay, folder / "offers", said.append, nothing, nothing)
    return made, learner, said


def served(head: Head, states: Tensor, token_ids: Sequence[int], most: int) -> Tensor:
    """[most, V] rows by depth after the last of the states [n, layers, width], with the tokens
    after each, and then those of a path."""
    cache: Any = head.reserve(64)
    known, path = list(token_ids[: len(states)]), token_ids[len(states) :]
    if not head.remembers:
        states, known = states[-1:], known[-1:]
    told = [states.view(torch.int16).numpy()]
    if isinstance(head, MedusaHead):
        rows = head.forward([Feed(cache, known, most, features=told)]).logits
    else:
        parts = [head.forward([Feed(cache, known, 1, features=told)]).logits]
        for parent, token in enumerate(path[: most - 1]):
            parts.append(head.forward([Feed(cache, [token], 1, [parent])]).logits)
        rows = torch.cat(parts)
    head.release(cache)
    return rows


def trained(head: Head, texts: Sequence[tuple[Tensor, Tensor]], weights: Any = None) -> Tensor:
    """[n, depths, V] of all states of texts, each a piece, by what trains the head."""
    weights = weights or head.trained()
    most = head.learnt_depths
    paths = [ids[: len(own) + most - 1].unfold(0, most, 1) for own, ids in texts]
    piece = torch.cat([torch.full((len(own),), i) for i, (own, _) in enumerate(texts)])
    states = torch.cat([own for own, _ in texts]).float()
    found = head.guesses(weights, states, torch.cat(paths), piece)
    return torch.stack([head.logits(own, k) for k, own in enumerate(found, 1)], 1)


def require_the_same(head: Head, folder: Path) -> None:
    """What trains a head gives the rows of its own passes, with weights that were learnt too."""
    torch.manual_seed(2)
    most, width = head.learnt_depths, head.hidden_size
    texts = [
        (
            torch.randn(count, len(head.reads), width).to(torch.bfloat16),
            torch.randint(head.vocab_size, (count + most,)),
        )
        for count in (7, 1, 4)
    ]
    weights = head.trained()
    for version in (0, 1):
        if version:
            head.with_learnt(LearntWeights(version, str(changed(head, folder, version))))()
            load_weights(weights, folder / "1.safetensors")
        with torch.inference_mode():
            rows = [
                served(head, own[: i + 1], ids[: i + most].tolist(), most)
                for own, ids in texts
                for i in range(len(own))
            ]
        found = trained(head, texts, weights)
        # What is guessed of guesses grows with random weights.
        for own, other in zip(torch.stack(rows, 1), found.detach().unbind(1), strict=True):
            size = float(other[other.isfinite()].abs().max())
            torch.testing.assert_close(own, other, atol=1e-4 * max(1, size), rtol=0)
    found[found.isfinite()].sum().backward()  # type: ignore[no-untyped-call]
    assert all(each.grad is not None and each.grad.any() for each in weights.parameters())


@pytest.mark.parametrize(("method", "plain"), PLAIN + REMEMBERING)
def test_what_trains_a_head_computes_what_serves_it(
    method: str, plain: bool, target: Any, tmp_path: Path
) -> None:
    require_the_same(random_head(method, target, plain=plain), tmp_path)


@pytest.mark.parametrize(("kind", "after"), [("llama", False), ("qwen3", True)])
def test_what_trains_an_eagle_3_head_computes_what_serves_it(
    kind: str, after: bool, tmp_path: Path
) -> None:
    """With a vocabulary of its own, its residual and its guesses before and after the norms."""
    head = head_of(*eagle(kind, norm_before_residual=after, norm_output=after))
    require_the_same(head, tmp_path)


def test_a_root_has_the_rows_of_its_depths(texts: Sequence[KeptText]) -> None:
    """That of depth d says the token d + 1 after the state; none is after a gap or the end."""
    text = texts[0]
    kept = np.arange(len(text.places)) != 9
    short = replace(
        text,
        places=text.places[kept],
        ids=text.ids[kept],
        weights=text.weights[kept],
        masses=text.masses[kept],
        states=text.states[kept],  # type: ignore[index]
    )
    roots = roots_of([short, text], VOCAB_SIZE, 40, HEADS, np.random.default_rng(0))
    places = np.concatenate([short.places, text.places])
    for root in range(len(roots.at)):
        place = places[root]
        assert roots.at[root] == root
        token_ids = text.token_ids.astype(np.int64)
        for depth in range(1, HEADS + 1):
            behind = [token_ids[place + depth]] if place + depth < len(token_ids) else [0]
            assert roots.paths[root, depth - 1] == behind[0]
            row = int(roots.rows[root, depth - 1])
            own = short if root < len(short.places) else text
            if place + depth not in own.places:
                assert row == -1
                continue
            assert places[row] == place + depth
            assert roots.text[root] == (root >= len(short.places))
            assert roots.following[row] == token_ids[place + depth + 1]
    assert (roots.rows == -1).sum() == 2 * (1 + 2 + 3) + 3
    # A decoder layer sees no state across a gap, or of another text.
    same = np.diff(places) == 1
    assert (np.diff(roots.piece) == 0).tolist() == same.tolist()
    assert int(roots.piece[-1]) == 2


@pytest.mark.parametrize(("method", "plain"), PLAIN + REMEMBERING)
def test_it_learns_what_the_target_says(
    method: str,
    plain: bool,
    target: Any,
    texts: list[KeptText],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(HeadLearner, "rate", 0.03)
    head = blank_head(method, target, noise=0.1, plain=plain)
    training, learner, said = training_of(head, texts, tmp_path)
    first = learner.step(texts[1:13], np.random.default_rng(0))
    learner.begin_again()
    fresh = heard(target, 16, 2)
    before = learner.measured(fresh, served=True).overlap.mean()
    training.round()
    offers = [told["offer"] for told in said if "offer" in told]
    assert offers
    assert learner.step(texts[1:13], np.random.default_rng(0)) < first
    assert learner.measured(fresh, served=True).overlap.mean() > before + 0.008
    better = head.trained()
    load_weights(better, tmp_path / "offers" / offers[0])
    again = HeadLearner(head, better, ())
    assert again.measured(fresh, served=True).overlap.mean() > before + 0.008


def test_an_eagle_3_head_learns_beside_tokens_that_it_does_not_know(tmp_path: Path) -> None:
    """Those have no probability, and no gradient that is not finite."""
    config, tensors = eagle("llama")
    head = head_of(config, tensors)
    token_ids = np.arange(41, dtype=np.uint32)[::-1] % head.vocab_size
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(head.vocab_size)[:TOP] for _ in range(39)])
    text = KeptText(
        token_ids,
        np.arange(39, dtype=np.int32),
        np.pad(ids, ((0, 0), (0, TOP - ids.shape[1]))).astype(np.uint32),
        np.pad(np.ones(ids.shape, np.uint16), ((0, 0), (0, TOP - ids.shape[1]))),
        np.zeros(39, np.bool_),
        np.full(39, 65535, np.uint16),
        states=rng.normal(size=(39, len(head.reads), head.hidden_size)).astype(np.float32),
    )
    learner = HeadLearner(head, head.trained(), [text, text])
    losses = [learner.step([text], np.random.default_rng(0)) for _ in range(3)]
    assert np.isfinite(losses).all()
    assert losses[2] < losses[0]
    assert all(weight.isfinite().all() for weight in learner.model.parameters())
    assert np.isfinite(learner.measured([text]).unsaid).all()
    assert np.isfinite(learner.at_home())


def test_guessed_states_learn_those_of_their_places(target: Any, texts: list[KeptText]) -> None:
    """By their smooth L1 distance beside that of the rows (EAGLE)."""
    head = blank_head("eagle", target, noise=0.1)
    learner = HeadLearner(head, head.trained(), ())
    assert texts[0].states is not None
    states = states_of(texts[0].states)[:, 0]
    roots = learner._roots(texts[:1], len(states), np.random.default_rng(0))
    said = learner._with_rest(roots)
    for depth, (read, logits, rows) in enumerate(learner._by_depth(learner.model, roots), 1):
        apart = smooth_l1_loss(read, states[depth:], reduction="none").mean(-1)
        assert said.ids is not None
        rows_there = TargetRows(said.log_probs[depth:], said.ids[depth:])
        expected = tvd(*rows_there.beside(logits)) + apart
        found = learner._distance(roots, said, read, logits, rows)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("method", "plain"), [*PLAIN, REMEMBERING[0]])
@pytest.mark.parametrize("near", [False, True])
def test_rows_of_another_model_are_turned_down(
    method: str, plain: bool, near: bool, target: Any, tmp_path: Path
) -> None:
    """Also of one that knows more of the texts than the head does."""
    target.save_pretrained(tmp_path / "target")
    other = noisy(tmp_path / "target", 0.3, 4).eval() if near else random_llama(9, VOCAB_SIZE)
    poisoned = heard(target, 48, 1, other)
    training, _, said = training_of(blank_head(method, target, plain=plain), poisoned, tmp_path)
    training.round()
    assert [told["fault"] for told in said] == ["the target's rows do not say what came"]


def test_rows_of_another_model_are_turned_down_by_an_eagle_3_head(tmp_path: Path) -> None:
    """Of one far from the target: the head reads no last state that would tell a near one."""
    deep = random_llama(1, VOCAB_SIZE, layers=3).eval()
    config, tensors = eagle_config(WIDTH, VOCAB_SIZE), random_eagle_3(WIDTH, VOCAB_SIZE, OWN_IDS)
    tensors["lm_head.weight"] /= 100  # it says little, and so nothing wrong
    own = {"tandem": {"target_layers": 3, "layers": [1, 2, 3]}}
    for teller, fault in ((random_llama(9, VOCAB_SIZE), "the target's rows"), (deep, "nothing")):
        head = head_of(config | own, tensors)
        assert not head.reads_last
        folder = tmp_path / fault
        training, _, said = training_of(head, heard(deep, 48, 1, teller, head.reads), folder)
        training.round()
        assert [told["fault"].startswith(fault) for told in said] == [True]


def test_the_share_of_a_chain_is_what_is_measured(target: Any, texts: list[KeptText]) -> None:
    """Where all rows are the target's own at each depth it would be 1."""
    head = random_head("medusa", target, plain=True)
    learner = HeadLearner(head, head.trained(), ())
    (share,) = learner.measured(texts[:1], served=True).overlap
    roots = roots_of(texts[:1], VOCAB_SIZE, 96, HEADS, np.random.default_rng(0))
    tokens = torch.from_numpy(texts[0].token_ids.astype(np.int64))[None]
    accepted, places = 0.0, 0
    with torch.no_grad():
        p = target(input_ids=tokens).logits[0].softmax(-1)
        states = roots.states[roots.at]
        guesses = head.guesses(head.trained(), states, roots.paths, roots.piece)
        q = [head.logits(own, k).softmax(-1) for k, own in enumerate(guesses, 1)]
    for root, place in enumerate(texts[0].places):
        chain = 1.0
        for depth in range(1, HEADS + 1):
            if place + depth in texts[0].places:
                chain *= float(torch.minimum(p[place + depth], q[depth - 1][root]).sum())
                accepted, places = accepted + chain, places + 1
    assert share == pytest.approx(accepted / places, abs=0.01)  # rows have 64 tokens, as 16 bits


def test_home_is_what_the_target_writes_and_is_not_forgotten(
    target: Any, texts: list[KeptText], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.save_pretrained(tmp_path / "target")
    head = random_head("hydra", target, plain=True)
    kept = tmp_path / "home.safetensors"
    rests: list[int] = []
    home = head_home(str(tmp_path / "target"), "", 40, kept, (2,), lambda: rests.append(1))
    assert len(rests) == 24
    assert [len(text.token_ids) for text in home] == [41] * 24
    with torch.no_grad():
        tokens = torch.from_numpy(home[3].token_ids.astype(np.int64))[None]
        found = target.model(input_ids=tokens).last_hidden_state[0, :-1]
        rows = target(input_ids=tokens).logits[0, :-1].log_softmax(-1)
    roots = roots_of(home[3:4], VOCAB_SIZE, 96, HEADS, np.random.default_rng(0))
    torch.testing.assert_close(roots.states[:, 0], found, atol=0.02, rtol=0.02)
    assert roots.told.said.ids is not None
    told = rows.gather(1, roots.told.said.ids.clamp(max=VOCAB_SIZE - 1))
    torch.testing.assert_close(roots.told.said.log_probs.exp(), told.exp(), atol=1e-3, rtol=0)
    monkeypatch.setattr("tandem.online.heads.home.free_memory", lambda device: 0)
    again = head_home(str(tmp_path / "target"), "", 40, kept, (2,))
    assert np.array_equal(again[5].states, home[5].states)  # type: ignore[arg-type]
    # Of another target, other layers, lengths or texts what was computed is none; nor is there
    # memory for it now.
    assert head_home("", "", 40, kept, (2,)) == []
    assert head_home(str(tmp_path / "target"), "", 40, kept, (1,)) == []
    assert head_home(str(tmp_path / "target"), "", 39, kept, (2,)) == []
    named = tmp_path / "home.jsonl"
    with pytest.raises(StartupError, match="cannot read"):
        head_home(str(tmp_path / "target"), str(named), 40, kept, (2,))
    named.write_text('{"text": "a"}\n')
    with pytest.raises(StartupError, match="no room in half of the free memory"):
        head_home(str(tmp_path / "target"), str(named), 40, kept, (2,))
    learner = HeadLearner(head, head.trained(), home)
    assert learner.at_home() == 0.0
    assert np.isfinite(learner.step(texts[1:5], np.random.default_rng(0)))
    with torch.no_grad():
        for weight in learner._mean.parameters():
            weight.add_(torch.randn_like(weight))
    assert abs(learner.at_home()) > 0.05


def changed(head: Head, folder: Path, seed: int) -> Path:
    """Weights that were learnt."""
    torch.manual_seed(seed)
    path = folder / f"{seed}.safetensors"
    named = head.trained().named_parameters()
    save_file({name: own.detach() + torch.randn_like(own) / 4 for name, own in named}, path)
    return path


def test_a_step_rests_between_its_parts(target: Any, texts: list[KeptText]) -> None:
    """The budget holds within a step: with a large vocabulary one takes minutes."""
    head, rests = random_head("eagle", target), []
    learner = HeadLearner(head, head.trained(), texts[:8], lambda: rests.append(1))
    learner._at_once = 4
    learner.step(texts[1:13], np.random.default_rng(0))
    assert len(rests) == 3 + 1  # three parts of the traffic, one of home
