"""Mistakes in a batch that the start must notice, whatever a model's weights and dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.inference.batch import attention
from tandem.inference.batch.packed import PackedBatch
from tandem.inference.batch.segment import Segment
from tandem.inference.kv.pool import KVPool

Mistake = Callable[[pytest.MonkeyPatch], None]


def forget_causality(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PackedBatch, "mask", lambda *_: None)


def see_the_next_token(patch: pytest.MonkeyPatch) -> None:
    right = PackedBatch.mask

    def wrong(
        self: PackedBatch, count: int, seen: int, window: int | None, groups: int, like: Tensor
    ) -> Tensor | None:
        mask = right(self, count, seen, window, groups, like)
        if mask is None:
            return None
        mask = mask.clone().view(groups, count, seen)
        for row in range(count - 1):
            mask[:, row, seen - count + row + 1] = 0
        return mask.flatten(0, 1)

    patch.setattr(PackedBatch, "mask", wrong)


def _other_positions(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    right = PackedBatch.of.__func__  # type: ignore[attr-defined]

    def wrong(cls: type[PackedBatch], *args: Any) -> PackedBatch:
        batch: PackedBatch = right(cls, *args)
        batch.positions = change(batch.positions)
        return batch

    patch.setattr(PackedBatch, "of", classmethod(wrong))


def count_positions_along_the_batch(patch: pytest.MonkeyPatch) -> None:
    """As a model does that is not given, or does not honour, its position ids."""
    _other_positions(patch, lambda positions: torch.arange(positions.shape[1])[None])


def shift_later_positions_by_one(patch: pytest.MonkeyPatch) -> None:
    _other_positions(patch, lambda positions: positions + (positions >= 12).long())


def _other_attention(patch: pytest.MonkeyPatch, change: Callable[..., Tensor]) -> None:
    right: Any = attention._attend_one

    def wrong(batch: Any, q: Tensor, k: Tensor, v: Tensor, segment: Segment, *rest: Any) -> Tensor:
        return change(right, (batch, q, k, v), segment, *rest)

    patch.setattr(attention, "_attend_one", wrong)


def scale_scores_by_a_quarter_more(patch: pytest.MonkeyPatch) -> None:
    def wrong(right: Any, first: Any, segment: Segment, scaling: Any, *rest: Any) -> Tensor:
        scale = first[1].shape[-1] ** -0.5 if scaling is None else scaling
        found: Tensor = right(*first, segment, 1.25 * scale, *rest)
        return found

    _other_attention(patch, wrong)


def add_a_sink(patch: pytest.MonkeyPatch) -> None:
    """Which takes an eighth of each token's attention."""

    def wrong(right: Any, first: Any, *rest: Any) -> Tensor:
        found: Tensor = right(*first, *rest)
        return found * 0.875

    _other_attention(patch, wrong)


def read_rows_of_a_neighbour(patch: pytest.MonkeyPatch) -> None:
    def wrong(right: Any, first: Any, segment: Segment, *rest: Any) -> Tensor:
        shifted = replace(segment, start=max(0, segment.start - 3))
        found: Tensor = right(*first, shifted, *rest)
        return found

    _other_attention(patch, wrong)


def widen_the_window(patch: pytest.MonkeyPatch) -> None:
    """By one position."""

    def wrong(
        right: Any, first: Any, segment: Segment, scaling: Any, window: Any, cap: Any
    ) -> Tensor:
        wider = None if window is None else window + 1
        found: Tensor = right(*first, segment, scaling, wider, cap)
        return found

    _other_attention(patch, wrong)


def keep_keys_of_a_rejected_draft(patch: pytest.MonkeyPatch) -> None:
    """A slot's first key stays, whatever is written after a rollback."""
    right = KVPool.write
    written: dict[tuple[int, int], set[int]] = {}

    def wrong(self: KVPool, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        seen = written.setdefault((id(self), layer), set())
        slots = self.slots.tolist()
        old = [slot for slot in slots if slot in seen]
        before = self.keys[layer][:, old].clone() if old else None
        both = right(self, layer, keys, values)
        if before is not None:
            self.keys[layer][:, old] = before
        seen.update(slots)
        return both

    patch.setattr(KVPool, "write", wrong)


# Each for every model; and one for models with a window.
MISTAKES: tuple[Mistake, ...] = (
    forget_causality,
    see_the_next_token,
    count_positions_along_the_batch,
    shift_later_positions_by_one,
    scale_scores_by_a_quarter_more,
    add_a_sink,
    read_rows_of_a_neighbour,
    keep_keys_of_a_rejected_draft,
)
OF_WINDOWS: tuple[Mistake, ...] = (widen_the_window,)
