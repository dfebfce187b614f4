"""The benchmark of passes: each run leaves its texts as they were, and all take turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("openvino")

from benchmarks.passes import ours, timed
from tandem.inference.choice.candidates import by_torch
from tests.support.models.tiny import random_llama


@torch.inference_mode()
def test_a_pass_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = by_torch(random_llama(1))
    run = ours(backend)
    fed: list[list[tuple[int, int]]] = []
    forward = backend.forward

    def noted(feeds: Any) -> Any:
        fed.append([(feed.cache.length, len(feed.token_ids)) for feed in feeds])
        return forward(feeds)

    monkeypatch.setattr(backend, "forward", noted)
    run(4, 5)
    run(1, 17)
    assert fed == [[(200, 5)] * 4, [(200, 17)]]


def test_runs_take_turns() -> None:
    order: list[str] = []
    runs = [lambda texts, rows, name=name: order.append(name) for name in ("a", "b")]
    found = timed(runs, 1, 1)
    assert len(found) == 2
    assert order == ["a"] * 7 + ["b"] * 7
