"""Replacements for flex attention's compiled kernel, which needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tandem.inference.batch import flex, tiles
from tandem.inference.passes import one_call

BLOCK = 16  # so that small texts have several


def without_compiler(patch: pytest.MonkeyPatch) -> None:
    """Use flex attention's uncompiled operators, and small blocks of the pool."""
    for module in (tiles, flex, one_call):
        patch.setattr(module, "BLOCK", BLOCK)
    name = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    patch.setattr(name, True)


def as_a_device_reads(query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    """Attention that reads, for each tile, exactly the whole blocks in the tile's table."""
    mask: BlockMask = options["block_mask"]
    scale, score_mod = options["scale"] or query.shape[-1] ** -0.5, options["score_mod"]
    size, block = mask.BLOCK_SIZE
    groups = query.shape[1] // keys.shape[1]
    keys, values = (states[0].repeat_interleave(groups, 0) for states in (keys, values))
    parts = []
    for tile, count in enumerate(mask.kv_num_blocks[0, 0].tolist()):
        blocks = mask.kv_indices[0, 0, tile, :count]
        positions = (blocks[:, None] * block + torch.arange(block)).flatten()
        places = torch.arange(tile * size, (tile + 1) * size)
        scores = query[0, :, places] @ keys[:, positions].transpose(1, 2) * scale
        if score_mod is not None:
            scores = score_mod(scores)
        nothing = torch.tensor(0)
        sees = mask.mask_mod(nothing, nothing, places[:, None], positions[None])
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num(0)
        parts.append(weights @ values[:, positions])
    return torch.cat(parts, 1)[None]


@dataclass
class Kernel:
    """Replaces compiled attention by operators that use its arguments, the mask and the table of
    blocks, so that mistakes in these show."""

    calls: int = 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.calls += 1
        mask, device = options["block_mask"], query.device
        none = torch.zeros((), dtype=torch.int32, device=device)
        places = torch.arange(mask.seq_lengths[0], device=device)[:, None]
        positions = torch.arange(mask.seq_lengths[1], device=device)[None]
        read = _blocks_read(mask, device)
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, 1) for states in (key, value))
        scores = query @ key.transpose(2, 3) * (options["scale"] or 1)
        if options["score_mod"] is not None:
            scores = options["score_mod"](scores, none, none, places, positions)
        seen = mask.mask_mod(none, none, places, positions) & read
        # `masked_fill` by a mask that is spread over the heads takes four times as long.
        return torch.where(seen, scores, -torch.inf).softmax(-1).nan_to_num(0) @ value


def _blocks_read(mask: BlockMask, device: torch.device) -> Tensor:
    """[N, positions]: whether the tile of a slot reads the block of a position."""
    size, block = mask.BLOCK_SIZE
    places, positions = mask.seq_lengths
    nth = torch.arange(mask.kv_indices.shape[-1], device=device)
    counted = nth < mask.kv_num_blocks[0, 0][:, None]
    blocks = torch.arange(-(-positions // block), device=device)
    found = ((mask.kv_indices[0, 0][..., None] == blocks) & counted[..., None]).any(1)
    tiles = torch.arange(places, device=device) // size
    return found[tiles][:, torch.arange(positions, device=device) // block]
