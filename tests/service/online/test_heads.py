"""Heads that learn while they serve, through real sockets: from the states that came, by their own
trainer, which works here between the texts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter_svc.loading import load
from drafter_svc.settings import DrafterSettings
from tandem.errors import StartupError
from tandem.inference.feed import Feed
from tandem.online.__main__ import head_learner
from tandem.online.kept_text import TOP, KeptText
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.exactness import CELLS, Case, counts_at, target_law
from tests.service.online.serving import FakeTrainer, Served, drafting, served
from tests.support.laws.laws import chi_square_p_value
from tests.support.models.heads import MTP, family_of, save_blank_head
from tests.support.waiting import until
from tests.support.wire.fakes import generation

_TEXTS = 60


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.online.learning.TrainerProcess", FakeTrainer)
    monkeypatch.setattr("tandem.online.learning._TICK_SECONDS", 0.005)
    monkeypatch.setattr("tandem.online.learning._SECONDS", 0.01)


@dataclass
class Learning:
    """A head that learns, and where it lies."""

    drafter: Served
    head: Path
    target: Path
    folder: Path

    def kept(self) -> list[KeptText]:
        """All texts."""
        replay = self.drafter.learning.replay
        return [text for file in replay.files() for text in replay.read(file)]


CAMPAIGN = pytest.mark.campaign(
    "the law, and what outlives the process, of the other heads with decoder layers that learn",
    "the same of eagle (this file); unit/online/heads: their passes, weights and keys",
)
PREFIXED = "hydra++"


@pytest.fixture(
    params=[
        "medusa",
        "hydra",
        "eagle",
        *(pytest.param(name, marks=CAMPAIGN) for name in (PREFIXED, MTP)),
    ]
)
async def learning(
    request: pytest.FixtureRequest, random_pair: tuple[Path, Path], tmp_path: Path
) -> AsyncIterator[Learning]:
    target = random_pair[1]
    plain = request.param != PREFIXED
    kind = request.param if plain else "hydra"
    head = save_blank_head(tmp_path / "head", kind, target, plain=plain)
    keys = {"method": family_of(kind), "target": str(target)}
    async with (
        AsyncExitStack() as stack,
        drafting(stack, head, tmp_path / "state", **keys) as found,
    ):
        yield Learning(found, head, target, tmp_path / "state")


async def learn(learning: Learning, seed: int) -> None:
    """Have the trainer's own steps served."""
    learner = head_learner(FakeTrainer.newest.order, lambda: None)
    texts = learning.kept()
    for _ in range(3):
        learner.step(texts[:12], np.random.default_rng(seed))
    await learning.drafter.change(learner.model)


async def write(stub: Any, gamma: int, tokens: int, seed: int = 0, **sampling: float) -> Any:
    """A text, with its summary."""
    message = generation(
        prompt_token_ids=[1, 2],
        sampling={"seed": seed, **sampling},
        stopping={"max_new_tokens": tokens, "ignore_eos": True},
        speculation={"gamma": gamma} | ({"max_nodes": 8} if gamma else {}),
    )
    return await stub.Complete(pb.CompleteRequest(generation=message))


async def test_texts_keep_their_law_while_a_head_learns(
    learning: Learning, random_pair: tuple[Path, Path]
) -> None:
    """What it learns from is what the target computed."""
    drafter, counts = learning.drafter, np.zeros(CELLS, np.int64)
    async with served(drafter, learning.target, feedback="last", engine="torch") as (address, stub):
        case = Case("block", 3, "dense", 6)
        await asyncio.gather(
            *(write(stub, 4, 24, seed=seed, temperature=1.0) for seed in range(16))
        )
        await until(lambda: drafter.learning.status.kept_texts >= 12)
        for part in (1, 2):
            counted = counts_at(address, case, range(_TEXTS * part, _TEXTS * (part + 1)))
            found, _ = await asyncio.gather(counted, learn(learning, part))
            counts += found
        assert drafter.learning.status.version == 2
        greedy = []
        for gamma in (0, 4):
            reply = await write(stub, gamma, 40, temperature=0.0)
            greedy.append(list(reply.token_ids))
            assert bool(gamma) == bool(reply.summary.accepted_tokens)
            assert reply.summary.drafter_weights_version == (2 if gamma else 0)
        assert greedy[0] == greedy[1]
    assert chi_square_p_value(counts, target_law(learning.target)) > 1e-4
    assert chi_square_p_value(counts, target_law(random_pair[0])) < 1e-4, "any law would pass"
    text = learning.kept()[0]
    target = AutoModelForCausalLM.from_pretrained(learning.target)
    tokens = torch.from_numpy(text.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        states = target.model(input_ids=tokens).last_hidden_state[0, text.places.tolist()]
        rows = target(input_ids=tokens).logits[0, text.places.tolist()]
    assert text.states is not None
    kept = torch.from_numpy(text.states).view(torch.bfloat16).float()[:, 0]
    torch.testing.assert_close(kept, states, atol=0.03, rtol=0.03)
    assert text.ids[:, 0].tolist() == rows.argmax(-1).tolist()


async def test_what_a_head_learnt_outlives_the_process(learning: Learning, tmp_path: Path) -> None:
    """And is refused by another head."""
    drafter, info = learning.drafter, await learning.drafter.info()
    assert (info.feedback.top, list(info.feedback.layers)) == (TOP, [2])
    changed = drafter.servicer.loaded.models[0].trained()  # type: ignore[attr-defined]
    with torch.no_grad():
        for weight in changed.parameters():
            weight.add_(1)
    await drafter.change(changed)
    assert (await drafter.info()).info.fingerprint == info.info.fingerprint
    await asyncio.to_thread(drafter.learning.close)
    keys: dict[str, Any] = {"method": info.drafter, "target": str(learning.target), "online": 1}
    folder: dict[str, Any] = {"online_folder": learning.folder}
    again = await asyncio.to_thread(
        load, DrafterSettings(model=str(learning.head), **keys, **folder)
    )
    again.learning.close()  # type: ignore[union-attr]
    model: Any = again.models[0]
    assert (model.about.weights_version, again.info.fingerprint) == (1, info.info.fingerprint)
    cache = model.reserve(8)
    assert cache.weights_version == 1
    states = torch.randn(1, 1, 16).to(torch.bfloat16)
    guesses = model.guesses(changed, states.float(), torch.tensor([[3] * 8]), torch.tensor([0]))
    with torch.inference_mode():
        feed = Feed(cache, [3], 1, features=[states.view(torch.int16).numpy()])
        rows = model.forward([feed]).logits
    torch.testing.assert_close(rows, model.logits(guesses[0], 1), atol=1e-4, rtol=1e-4)
    other = save_blank_head(tmp_path / "other", info.drafter, learning.target, seed=5)
    with pytest.raises(StartupError, match=r"learnt from weights \w{12}.*ONLINE_ANEW=true"):
        load(DrafterSettings(model=str(other), **keys, **folder))


def test_home_texts_of_a_head_need_its_target(
    random_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    head = save_blank_head(tmp_path / "head", "medusa", random_pair[1])
    config = json.loads((head / "config.json").read_text()) | {"tandem": {"target_layers": 1}}
    (head / "config.json").write_text(json.dumps(config))
    keys: dict[str, Any] = {"method": "medusa", "model": str(head), "online_home": "texts.jsonl"}
    with pytest.raises(StartupError, match="name its checkpoint with TANDEM_DRAFTER_TARGET"):
        load(DrafterSettings(online=1, online_folder=tmp_path / "state", **keys))
