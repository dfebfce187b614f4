"""At the start a device gets one-call attention, if that compiles and gives the plain logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from triton.runtime.errors import OutOfResources

from tandem.inference.batch.tiles import FEW, MANY, ONE, Tiles
from tandem.inference.feed import Feed
from tandem.inference.passes import cuda_graphs as graph
from tandem.inference.passes import one_call
from tandem.kernels import attention
from tests.support.decoders import decoder_over
from tests.support.devices.recording import Recorder
from tests.support.models.architectures import (
    KINDS,
    SMALL,
    SUPPORTED,
    Architecture,
    build,
    one_layer,
)
from tests.support.models.parity import TOLERANCE, worst_difference
from tests.support.models.trees import narrow, plain_rows, random_trees, tree_rows, worst_of

OTHERS = pytest.mark.campaign(
    "attention in one call gives the plain logits, of every architecture",
    "an architecture of each kind, and one with windows beside whole layers (this file)",
)
every_architecture = pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=row.model_type,
            marks=() if row in KINDS or row.model_type == "gemma2" else OTHERS,
        )
        for row in SUPPORTED
    ],
)


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_call, "worthwhile", lambda _: True)


def test_what_a_former_holder_left_is_not_read() -> None:
    """A text whose numbers were not finite must not reach whoever has its extent next."""
    decoder = decoder_over(build(SMALL), "tiny", cache_tokens=64)
    caches = [decoder.reserve(16) for _ in range(2)]
    feeds = [Feed(cache, [1, 2, 3], 3) for cache in caches if cache is not None]
    with torch.inference_mode():
        for states in (*decoder.pool.keys, *decoder.pool.values):
            states.fill_(torch.nan)
        assert decoder.forward(feeds).logits.isfinite().all()


@every_architecture
def test_architectures_give_the_plain_logits(
    row: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    computing = attention.attend

    def counting(*args: Any) -> Any:
        calls.append(len(args))
        return computing(*args)

    monkeypatch.setattr(attention, "attend", counting)
    assert worst_difference(one_layer(row)) < TOLERANCE
    assert len(calls) > 20


TREES = [row for row in SUPPORTED if row.model_type in ("llama", "mistral", "qwen3", "gemma2")]


@pytest.mark.parametrize("rows", [0, 32])
@pytest.mark.parametrize("row", TREES, ids=lambda row: row.model_type)
def test_trees_are_computed_in_one_call_and_by_graphs(
    row: Architecture, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(graph, "capture", recorder)
    model, trees = build(one_layer(row), **narrow(row)), random_trees(5)[:10]
    expected = plain_rows(model, trees)
    decoder = decoder_over(
        model, "tiny", cache_tokens=1000, trees=True, graph_rows=rows, longest=100
    )
    assert decoder.takes_trees
    assert decoder._backends.current.in_one_call
    at_start = recorder.replays
    found = [rows for group in (trees[:1], trees[1:]) for rows in tree_rows(decoder, group)]
    assert worst_of(expected, found) < TOLERANCE
    assert (recorder.replays > at_start + 4) == (rows > 0)


def test_what_does_not_compile_is_one_warning_and_one_call_a_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise OutOfResources(128 * 1024, 99 * 1024, "shared memory")

    monkeypatch.setattr(attention, "attend", refuse)
    with capture_logs() as logs:
        assert worst_difference(SMALL) < TOLERANCE
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert "out of resource: shared memory" in warning["reason"]


def test_what_computes_otherwise_is_one_warning_too(monkeypatch: pytest.MonkeyPatch) -> None:
    computing = attention.attend
    monkeypatch.setattr(attention, "attend", lambda *args: 2 * computing(*args))
    with capture_logs() as logs:
        assert worst_difference(SMALL) < TOLERANCE
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert "a ragged batch differs from a plain pass" in warning["reason"]


def test_the_start_feeds_what_is_compiled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size of a tile, and with splits and without: a single tile, and many."""
    kinds = set()
    seeing = Tiles.seen

    def noting(self: Tiles, window: int | None) -> Any:
        tiles, rows = seeing(self, window)
        kinds.add((self.size, tiles.shape[1] == 1, tiles.shape[1] >= 80))
        return tiles, rows

    monkeypatch.setattr(Tiles, "seen", noting)
    decoder_over(build(SMALL), "tiny", cache_tokens=64)
    for size in (ONE, FEW, MANY):
        assert {(size, True, False), (size, False, True)} <= kinds
