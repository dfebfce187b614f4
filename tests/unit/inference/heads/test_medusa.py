"""Medusa's rows are those of its formula, whoever named the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tandem.inference.feed import Feed
from tandem.inference.heads.medusa import MedusaHead
from tandem.inference.kv.size import Room
from tests.support.models.heads import (
    HEADS,
    Weights,
    eagle_config,
    random_medusa,
    random_mtp,
    source_of,
)

WIDTH, VOCAB_SIZE, LAYERS = 16, 7, 2
OWN = {"tandem": {"target_layers": 5, "acceptance": [[0.5, 0.25], [0.25]], "made_for": "ab"}}


def head_of(tensors: dict[str, Tensor], config: dict[str, Any] = OWN) -> MedusaHead:
    files = Weights(Path("medusa"), "medusa", config, tensors)
    return MedusaHead(source_of(files, Room(0, 0)))


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return random_medusa(WIDTH, VOCAB_SIZE, LAYERS)


def feed_of(state: Tensor, rows: int) -> Feed:
    cache: Any = ()
    return Feed(cache, [0], rows, features=[state.view(torch.int16).numpy()])


@pytest.fixture
def states() -> list[Tensor]:
    return [torch.randn(1, 1, WIDTH).to(torch.bfloat16) for _ in range(3)]


def plain(tensors: dict[str, Tensor], state: Tensor, head: int) -> Tensor:
    found = state[0, 0].float()
    for layer in range(LAYERS):
        at = f"{head}.{layer}.linear"
        found = found + silu(tensors[f"{at}.weight"] @ found + tensors[f"{at}.bias"])
    return tensors[f"{head}.{LAYERS}.weight"] @ found


def test_rows_are_those_of_the_paper(tensors: dict[str, Tensor], states: list[Tensor]) -> None:
    head = head_of(tensors)
    counts = (3, 1, 2)
    found = head.forward([feed_of(*each) for each in zip(states, counts, strict=True)]).logits
    wanted = [
        plain(tensors, state, row)
        for state, count in zip(states, counts, strict=True)
        for row in range(count)
    ]
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-5, rtol=1e-5)
    assert (head.depths, head.reads, head.hidden_size) == (HEADS, (6,), WIDTH)
    assert (head.made_for, head.acceptance) == ("ab", [[0.5, 0.25], [0.25]])
    assert (head.forward_passes, head.fed_tokens) == (1, 3)


def test_others_name_the_same_weights_otherwise(
    tensors: dict[str, Tensor], states: list[Tensor]
) -> None:
    """As vLLM's files do, and with one output matrix for all heads."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        head, layer, *_, kind = name.split(".")
        if "linear" in name:
            renamed[f"blocks.{head}.layers.{layer}.{kind}"] = tensor
    own = {name: tensor for name, tensor in tensors.items() if "linear" in name}
    shared = tensors[f"0.{LAYERS}.weight"]
    copies = {f"{head}.{LAYERS}.weight": shared.clone() for head in range(HEADS)}
    layouts: list[dict[str, Tensor]] = [
        renamed | {"lm_head.weight": shared},
        renamed | {f"lm_heads.{head}.weight": shared for head in range(HEADS)},
        own | copies,
        {f"medusa_heads.{name}": tensor for name, tensor in (own | copies).items()},
    ]
    first, *others = (
        head_of(layout).forward([feed_of(states[0], HEADS)]).logits for layout in layouts
    )
    for other in others:
        torch.testing.assert_close(other, first)


def test_a_text_alone_has_the_rows_that_it_has_among_others(
    tensors: dict[str, Tensor], states: list[Tensor]
) -> None:
    head = head_of(tensors)
    together = head.forward([feed_of(state, HEADS) for state in states]).logits
    for i, state in enumerate(states):
        alone = head.forward([feed_of(state, HEADS)]).logits
        torch.testing.assert_close(alone, together[i * HEADS : (i + 1) * HEADS])


def test_decoder_layers_remember_each_text_for_itself() -> None:
    """Runs of several lengths in one pass have the rows that they have alone."""
    torch.manual_seed(0)
    config = {"layer_config": eagle_config(WIDTH, VOCAB_SIZE), **OWN}
    weights = random_mtp(WIDTH) | {"lm_head.weight": torch.randn(VOCAB_SIZE, WIDTH)}
    files = Weights(Path("mtp"), "medusa", config, weights)
    head = MedusaHead(source_of(files, Room(64, 64)))
    runs = [torch.randn(count, 1, WIDTH).to(torch.bfloat16) for count in (4, 1, 3)]

    def rows(told: list[Tensor], caches: list[Any]) -> Tensor:
        feeds = []
        for cache, states in zip(caches, told, strict=True):
            cache.rollback(cache.length)
            features = [states.view(torch.int16).numpy()]
            feeds.append(Feed(cache, [0] * len(states), HEADS, features=features))
        return head.forward(feeds).logits

    caches = [head.reserve(8) for _ in runs]
    first = rows(runs, caches)
    more = rows([states[:2] for states in runs], caches)
    for i, states in enumerate(runs):
        mine = slice(i * HEADS, (i + 1) * HEADS)
        own = [head.reserve(8)]
        torch.testing.assert_close(rows([states], own), first[mine], atol=1e-4, rtol=1e-4)
        again = rows([states[:2]], own)
        torch.testing.assert_close(again, more[mine], atol=1e-4, rtol=1e-4)


def test_features_of_the_device_are_those_of_a_message(
    tensors: dict[str, Tensor], states: list[Tensor]
) -> None:
    head, cache = head_of(tensors), ()
    there = states[0].view(torch.int16)
    feed = Feed(cache, [0], HEADS, features=[there])  # type: ignore[arg-type]
    found = head.forward([feed]).logits
    assert torch.equal(found, head.forward([feed_of(states[0], HEADS)]).logits)
    assert np.isfinite(found.numpy()).all()
    # A text whose drafter was lost may have both; others share its pass.
    both = head.forward([feed, feed_of(states[1], HEADS)]).logits
    torch.testing.assert_close(both[:HEADS], found)
