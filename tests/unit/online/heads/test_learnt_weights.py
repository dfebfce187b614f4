"""Weights that a head learnt: new sequences have them, open ones those that they began with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.errors import StartupError
from tandem.inference.feed import Feed
from tandem.inference.heads.eagle import EagleHead
from tandem.inference.heads.head import Head
from tandem.inference.heads.hydra import HydraWeights
from tandem.inference.heads.medusa import MedusaHead, MtpWeights
from tandem.inference.loading.learnt_weights import LearntWeights, OtherCheckpoint
from tests.support.models.heads import MTP, random_head
from tests.unit.online.heads.test_learning_heads import (
    PLAIN,
    REMEMBERING,
    WIDTH,
    changed,
    target,
)

__all__ = ["target"]  # a fixture


def feed_of(head: Head, cache: Any, state: Tensor) -> Feed:
    rows = head.depths if isinstance(head, MedusaHead) else 1
    return Feed(cache, [3], rows, features=[state.view(torch.int16).numpy()])


def _layer_of(parts: Any) -> Any:
    """A decoder layer of a head's weights."""
    if isinstance(parts, MtpWeights):
        return parts.layers[0]
    return parts.prefix if isinstance(parts, HydraWeights) else parts.layer


@pytest.mark.parametrize(("method", "plain"), REMEMBERING)
@torch.inference_mode()
def test_open_sequences_go_on_with_the_keys_of_their_weights(
    method: str, plain: bool, target: Any, tmp_path: Path
) -> None:
    head, alone = (random_head(method, target, plain=plain) for _ in range(2))
    states = torch.randn(4, 1, WIDTH).to(torch.bfloat16)
    tokens, most = [3, 60, 7, 5], head.depths if method == MTP else 1
    told = [states.view(torch.int16).numpy()]
    caches: list[Any] = [head.reserve(16), alone.reserve(16)]
    cache, whole = caches
    head.forward([Feed(cache, tokens[:3], most, features=[told[0][:3]])])
    head.with_learnt(LearntWeights(1, str(changed(head, tmp_path, 1))))()
    caches += [head.reserve(16), None]
    first = ref(cache.weights)
    last = Feed(cache, tokens[3:], most, features=[told[0][3:]])
    new = Feed(caches[2], tokens, most, features=told)
    found = head.forward([last, new]).logits
    expected = alone.forward([Feed(whole, tokens, most, features=told)]).logits
    torch.testing.assert_close(found[:most], expected, atol=1e-3, rtol=1e-3)
    alone.with_learnt(LearntWeights(1, str(tmp_path / "1.safetensors")))()
    caches[3] = alone.reserve(16)
    expected = alone.forward([Feed(caches[3], tokens, most, features=told)]).logits
    torch.testing.assert_close(found[most:], expected, atol=1e-3, rtol=1e-3)
    # Their weights end with them.
    layers = ref(_layer_of(cache.weights.parts))
    head.release(cache)
    del cache, last
    caches.clear()
    assert first() is None
    assert layers() is None


@pytest.mark.parametrize(("method", "plain"), PLAIN)
@torch.inference_mode()
def test_a_sequence_keeps_the_weights_that_it_began_with(
    method: str, plain: bool, target: Any, tmp_path: Path
) -> None:
    head = random_head(method, target, plain=plain)
    state = torch.randn(1, 1, WIDTH).to(torch.bfloat16)
    caches, alone = [head.reserve(16)], []
    alone.append(head.forward([feed_of(head, caches[0], state)]).logits)
    for version in (1, 2):
        head.with_learnt(LearntWeights(version, str(changed(head, tmp_path, version))))()
        caches.append(head.reserve(16))
        alone.append(head.forward([feed_of(head, caches[-1], state)]).logits)
    assert [cache.weights_version for cache in caches if cache] == [0, 1, 2]
    assert head.about.weights_version == 2
    assert not torch.allclose(alone[0], alone[1])
    order = (1, 0, 2, 1)
    together = head.forward([feed_of(head, caches[number], state) for number in order]).logits
    torch.testing.assert_close(together, torch.cat([alone[number] for number in order]))
    with pytest.raises(MemoryError, match="two versions"):
        head.with_learnt(LearntWeights(3))
    for cache in caches[:2]:
        assert cache is not None
        head.release(cache)
    del cache
    caches.clear()
    head.with_learnt(LearntWeights(3))()
    last = head.reserve(16)
    rows = head.forward([feed_of(head, last, state)]).logits
    torch.testing.assert_close(rows, alone[0])  # those of the files


@torch.inference_mode()
def test_a_head_in_bfloat16_takes_what_was_learnt_in_float32(target: Any, tmp_path: Path) -> None:
    head = random_head("eagle", target)
    half = EagleHead(replace(head._source, dtype=torch.bfloat16))
    state, rows = torch.randn(1, 1, WIDTH).to(torch.bfloat16), []
    path = str(changed(head, tmp_path, 1))
    for own in (head, half):
        rows.append(own.forward([feed_of(own, own.reserve(16), state)]).logits)
        own.with_learnt(LearntWeights(1, path))()
        rows.append(own.forward([feed_of(own, own.reserve(16), state)]).logits)
    assert rows[3].dtype == torch.bfloat16
    before, after = (float((rows[n] - rows[1]).norm() / rows[1].norm()) for n in (0, 3))
    assert after < 0.05 < 0.3 < before


def test_a_device_without_room_for_what_was_learnt_says_so(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = random_head("medusa", target, plain=True)

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(head, "_formed", full)
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        head.with_learnt(LearntWeights(1, str(changed(head, tmp_path, 1))))


def test_weights_of_another_head_are_refused(target: Any, tmp_path: Path) -> None:
    head = random_head("medusa", target, plain=True)
    path = changed(head, tmp_path, 1)
    with pytest.raises(OtherCheckpoint, match="was learnt from weights other"):
        head.with_learnt(LearntWeights(1, str(path), "other"))
    hydra = changed(random_head("hydra", target, plain=True), tmp_path, 2)
    with pytest.raises(StartupError, match="are of another model"):
        head.with_learnt(LearntWeights(1, str(hydra)))
    own = dict(head.trained().named_parameters())
    next(iter(own.values())).data[0, 0] = torch.nan
    save_file({name: each.detach() for name, each in own.items()}, path)
    with pytest.raises(StartupError, match="not finite"):
        head.with_learnt(LearntWeights(1, str(path)))
    assert head.about.weights_version == 0
