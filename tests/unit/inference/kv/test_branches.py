"""Branches of a sequence: every path of a tree has the logits of its own plain pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from tandem.errors import Unsupported
from tandem.inference.choice.candidates import by_openvino, in_dtype
from tandem.inference.choice.record import StartRecord
from tandem.inference.decoder import Decoder
from tandem.inference.feed import DrawnToken, Draws, Feed
from tandem.inference.kv.branches import Branches
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.kv.pool import KVPool
from tandem.inference.loading.weights import sharing_weights
from tests.support.decoders import decoder_over
from tests.support.devices.bfloat16 import needs_units
from tests.support.models.architectures import KINDS, LLAMA, SUPPORTED, Architecture, build, light
from tests.support.models.parity import TOLERANCE, plain_logits
from tests.support.models.tiny import random_llama
from tests.support.models.trees import narrow, plain_rows, random_trees, tree_rows, worst_of

OTHERS = pytest.mark.campaign(
    "trees by OpenVINO, of every architecture, give the plain logits",
    "six architectures, one of each kind of position and layer; trees of every one by "
    "torch (this file)",
)

every_architecture = pytest.mark.parametrize("row", SUPPORTED, ids=lambda row: row.model_type)
MISTRAL = next(row for row in SUPPORTED if row.model_type == "mistral")
GEMMA = next(row for row in SUPPORTED if row.model_type == "gemma2")
# The scores of Gemma 2 have soft caps, which OpenVINO's attention has not.
CONVERTED = [row for row in SUPPORTED if row.model_type != "gemma2"]


def reserved(decoder: Decoder, capacity: int = 64, nodes: int = 16) -> SequenceCache:
    cache = decoder.reserve(capacity, nodes)
    assert cache is not None
    return cache


@every_architecture
def test_paths_of_trees_give_their_plain_logits_and_go_on_when_kept(row: Architecture) -> None:
    model, trees = build(light(row), **narrow(row)), random_trees(1)
    expected = plain_rows(model, trees)
    decoder = decoder_over(model, row.name, cache_tokens=1024)
    assert decoder.takes_trees
    found = [rows for group in (trees[:1], trees[1:]) for rows in tree_rows(decoder, group)]
    assert worst_of(expected, found) < TOLERANCE


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.model_type, marks=() if row in KINDS else OTHERS)
        for row in CONVERTED
    ],
)
def test_openvino_gives_them_too_or_leaves_trees_to_torch(row: Architecture) -> None:
    model, trees = build(row, **narrow(row)), random_trees(2, 40)
    expected = plain_rows(model, trees)
    decoder = decoder_over(model, row.name, cache_tokens=2048, engine="openvino", trees=row.slides)
    assert decoder.engine == "openvino"
    cache = reserved(decoder)
    assert isinstance(cache.pool, KVPool) == row.slides
    decoder.release(cache)
    found = [rows for group in (trees[:1], trees[1:]) for rows in tree_rows(decoder, group)]
    assert worst_of(expected, found) < TOLERANCE


@needs_units
def test_bfloat16_differs_by_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By units of their own kernels, where the processor has them."""
    pytest.importorskip("openvino")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    trees = random_trees(3, 40)
    expected = plain_rows(build(LLAMA), trees)
    model = in_dtype(build(LLAMA), torch.bfloat16)
    rounded = [rows.float() for rows in plain_rows(model, trees)]
    decoder = decoder_over(model, "tiny", cache_tokens=2048, engine="openvino")
    assert (decoder.engine, decoder.dtype) == ("openvino", "bfloat16")
    found = [rows.float() for rows in tree_rows(decoder, trees)]

    def error(rows: Sequence[torch.Tensor]) -> float:
        return float((torch.cat(tuple(rows)) - torch.cat(expected)).abs().mean())

    assert 0 < error(found) < 1.2 * error(rounded)


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("engine", ["torch", "openvino"])
@torch.inference_mode()
def test_chains_and_trees_share_a_batch(engine: Any) -> None:
    """With the logits that each has alone."""
    model, trees = build(LLAMA), random_trees(4)[:6]
    texts = [[(i * n) % 90 for i in range(3, 40)] for n in (3, 5, 7)]
    expected, chains = plain_rows(model, trees), plain_logits(model, texts)
    decoder = decoder_over(model, "tiny", cache_tokens=1024, engine=engine)
    caches = [reserved(decoder) for _ in (*texts, *trees)]
    decoder.forward([Feed(cache, text[:9], 0) for cache, text in zip(caches, texts, strict=False)])
    behind = list(zip(caches[len(texts) :], trees, strict=True))
    decoder.forward([Feed(c, tree.trunk[:-1] or [0], 0) for c, tree in behind])
    for cache, tree in behind:
        cache.rollback(len(tree.trunk) - 1)
    for nth, (first, last) in enumerate(((9, 10), (10, 37))):
        feeds = [Feed(c, text[first:last], 1) for c, text in zip(caches, texts, strict=False)]
        growing = [tree.feeds(cache)[nth] for cache, tree in behind]
        logits = decoder.forward([*feeds[:1], *growing, *feeds[1:]]).logits
        rows = iter(torch.split(logits, [1, *(feed.rows for feed in growing), 1, 1]))
        ends = [next(rows)]
        for (_, tree), theirs in zip(behind, expected, strict=True):
            wanted = theirs[: tree.cut + 1] if not nth else theirs[tree.cut + 1 :]
            found = next(rows)
            assert torch.allclose(found, wanted[: len(found)], atol=TOLERANCE)
        ends += rows
        for end, chain in zip(ends, chains, strict=True):
            assert torch.allclose(end[0], chain[last - 1], atol=TOLERANCE)


@pytest.mark.usefixtures("compiled_once")
@torch.inference_mode()
def test_several_drawn_tokens_are_a_level_of_a_tree() -> None:
    model = build(LLAMA)
    logits = []
    for drawn in (True, False):
        for engine in ("torch", "openvino"):
            decoder = decoder_over(
                model if engine == "torch" else build(LLAMA), "tiny", engine=engine
            )
            model = build(LLAMA)
            draws = Draws(torch.tensor([8, 4, 6, 10]), None)  # type: ignore[arg-type]
            levels: list[Any] = [
                [DrawnToken(draws, 1), DrawnToken(draws, 2)],
                [DrawnToken(draws, 3)] * 2,
            ]
            levels += [DrawnToken(draws, 0)]
            if not drawn:
                levels = [[4, 6], [10, 10], [8]]
            cache = reserved(decoder)
            decoder.forward([Feed(cache, [5, 9, 2], 0)])
            parents = ((0, 0), (2, 1), (4,))
            found = [
                decoder.forward([Feed(cache, level, len(level), hang)]).logits
                for level, hang in zip(levels, parents, strict=True)
            ]
            logits.append(torch.cat(found))
    for other in logits[1:]:
        assert torch.allclose(logits[0], other, atol=TOLERANCE)


# The start.


def forget_ancestry(patch: pytest.MonkeyPatch) -> None:
    """Siblings see each other, and a row all before it."""
    patch.setattr(Branches, "sees", property(lambda self: np.tri(len(self), dtype=bool)))


def forget_to_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVPool, "move", lambda *_: None)


def positions_by_place(patch: pytest.MonkeyPatch) -> None:
    right = Branches.grown

    def wrong(self: Branches, parents: Sequence[int]) -> Branches:
        grown = right(self, parents)
        return Branches(grown.parents, tuple(range(1, 1 + len(grown))))

    patch.setattr(Branches, "grown", wrong)


@pytest.mark.parametrize("mutant", [forget_ancestry, forget_to_move, positions_by_place])
@torch.inference_mode()
def test_a_model_whose_branches_are_wrong_is_named_and_serves_chains(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with capture_logs() as logs:
        decoder = decoder_over(build(LLAMA), "tiny")
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["event"] == "no trees are taken, only chains"
    assert warning["model"] == "LlamaForCausalLM (llama)"
    assert warning["reason"].startswith("the branches of a tree differ from plain passes: layer 1")
    assert not decoder.takes_trees
    with pytest.raises(Unsupported, match="takes no trees"):
        decoder.reserve(32, 4)
    cache = decoder.reserve(32)
    assert cache is not None
    decoder.forward([Feed(cache, [1, 2], 1)])
    with pytest.raises(ValueError, match="takes no trees"):
        decoder.forward([Feed(cache, [1, 2], 1, (0, 0))])


@pytest.mark.parametrize("trees", [False, True])
@torch.inference_mode()
def test_what_takes_trees_stays_at_hand_where_they_are_wanted(trees: bool) -> None:
    """The first one serves no chain any more when a faster one has come."""
    pytest.importorskip("openvino")

    model = build(MISTRAL)
    other = sharing_weights(model)
    decoder = decoder_over(model, "tiny", cache_tokens=64, trees=trees)
    faster = by_openvino(other, StartRecord(other, 1))
    assert faster is not None
    decoder._succeed(faster, ())
    assert (decoder.engine, decoder.takes_trees) == ("openvino", trees)
    chain = decoder.reserve(4)
    assert chain is not None
    assert not isinstance(chain.pool, KVPool)
    if trees:
        assert isinstance(reserved(decoder, 16).pool, KVPool)


def test_a_small_vocabulary_is_enough_for_the_probe() -> None:
    assert decoder_over(random_llama(1), "tiny").takes_trees
