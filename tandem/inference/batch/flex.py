"""Attention of a whole batch in one call: torch's flex attention, over the pool in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as compiler
from torch.nn.attention.flex_attention import flex_attention

from tandem.inference.batch.tiles import BLOCK, Tiles

# Shared memory for keys and values in flight; the smallest devices have 99 KiB in total.
_ON_THEIR_WAY = 64 * 1024
_STAGES, _WARPS = 2, 4
# Most compilations of attention, in place of torch's 8 a function. One model takes up to nine, and
# another of the same process, of another precision or head size, as many: a target and the four
# models of the largest forest take forty-five.
_MOST_COMPILATIONS = 64


def attend_tiled(
    tiles: Tiles,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """`attention.attend` for all sequences at once; same arguments and result."""
    # A setting of torch's for each thread: whoever serves is another than whoever has loaded.
    if compiler.recompile_limit < _MOST_COMPILATIONS:
        compiler.recompile_limit = _MOST_COMPILATIONS
    kernel: Any = _compiled() if query.is_cuda else flex_attention
    seen: Tensor = kernel(
        query.index_select(1, tiles.rows)[None],
        keys[None],
        values[None],
        score_mod=None if softcap is None else tiles.cap(softcap),
        block_mask=tiles.mask(window, keys.shape[1]),
        scale=scaling,
        enable_gqa=True,
        kernel_options=_options(tiles.size, keys, values),
    )
    return seen[0].transpose(0, 1).index_select(0, tiles.slots)


@cache
def _compiled() -> Callable[..., Any]:
    """The kernel of a device.

    Rows, tiles, blocks and positions are symbols in it (`dynamic`), since they change with every
    batch. Each tile size is compiled separately, and torch itself separates 128 rows and more.
    With `fullgraph`, a failed compilation raises instead of computing all scores of the pool.
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def _options(rows: int, keys: Tensor, values: Tensor) -> dict[str, Any]:
    """Options of the kernel: one tile per program, and blocks that fit into shared memory."""
    position = (keys.shape[-1] + values.shape[-1]) * keys.element_size()
    block = BLOCK
    while block > 16 and _STAGES * block * position > _ON_THEIR_WAY:
        block //= 2
    return {
        # The other kernel, for few queries, needs tiles that are a multiple of the grouped heads.
        "FORCE_USE_FLEX_ATTENTION": True,
        "BLOCK_M": rows,
        "BLOCK_N": block,
        "num_stages": _STAGES,
        "num_warps": _WARPS,
    }
