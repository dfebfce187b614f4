"""Small kernels of a decoding layer: rotations with the write to the cache, the gate of an MLP."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from tandem.kernels.operators import register

# Numbers that a program of the gate computes.
_BLOCK = 1024


def turn_and_write(
    heads: Tensor,
    turns: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    query_heads: int,
    gain: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate queries and keys, and write keys and values to the cache.

    Args:
        heads: [T, Hq + 2 H, D], queries, keys and values of each token; the two numbers that are
            rotated together are neighbours.
        turns: [T, 1, D/2] complex64, the rotation of each pair.
        slots: [T] int64, where each token goes.
        keys: [H, positions, D], written.
        values: [H, positions, D], written.
        query_heads: Hq.
        gain: [Hq + H, D], weights of the norm of each query and key (RMS, before the rotation);
            None without one.
        eps: of the norm.

    Returns:
        [T, Hq, D], the queries.
    """
    found: Tensor = _turn(
        heads, torch.view_as_real(turns), slots, keys, values, query_heads, gain, eps
    )
    return found


def gate(gate_up: Tensor) -> Tensor:
    """[T, 2 I] to [T, I]: silu of the first half, times the second."""
    found: Tensor = _gate(gate_up)
    return found


def _turn_by_operators(
    heads: Tensor,
    turns: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    query_heads: int,
    gain: Tensor | None,
    eps: float,
) -> Tensor:
    """See `turn_and_write`; `turns` are [T, 1, D/2, 2] float32."""
    turned, value = heads[:, : -len(keys)].float(), heads[:, -len(keys) :]
    if gain is not None:
        turned = turned * (turned.square().mean(-1, keepdim=True) + eps).rsqrt() * gain
    pairs = torch.view_as_complex(turned.reshape(*turned.shape[:2], -1, 2))
    pairs = pairs * torch.view_as_complex(turns)
    turned = torch.view_as_real(pairs).flatten(-2).to(heads.dtype)
    query, key = turned.tensor_split((query_heads,), 1)
    keys.index_copy_(1, slots, key.transpose(0, 1))
    values.index_copy_(1, slots, value.transpose(0, 1))
    return query.contiguous()


def _turn_by_triton(
    heads: Tensor,
    turns: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    query_heads: int,
    gain: Tensor | None,
    eps: float,
) -> Tensor:
    """See `_turn_by_operators`."""
    from tandem.kernels import triton_layer

    rows, count, width = heads.shape
    query = heads.new_empty(rows, query_heads, width)
    triton_layer.turn_and_write[(rows, count)](
        heads,
        turns,
        slots,
        heads if gain is None else gain,
        query,
        keys,
        values,
        eps,
        heads.stride(0),
        *keys.stride()[:2],
        *values.stride()[:2],
        HQ=query_heads,
        H=len(keys),
        D=width,
        WIDE=max(2, 1 << (width - 1).bit_length()),
        NORM=gain is not None,
        num_warps=1,
    )
    return query


def _turn_shapes(
    heads: Tensor,
    turns: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    query_heads: int,
    gain: Tensor | None,
    eps: float,
) -> Tensor:
    given = heads, turns, slots, keys, values, *(() if gain is None else (gain,))
    if len(devices := {tensor.device for tensor in given}) > 1:
        raise RuntimeError(f"rotations of tensors on more than one device: {devices}")
    return heads.new_empty(len(heads), query_heads, heads.shape[2])


def _gate_by_operators(gate_up: Tensor) -> Tensor:
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    first, second = wide.chunk(2, -1)
    return (silu(first) * second).to(gate_up.dtype)


def _gate_by_triton(gate_up: Tensor) -> Tensor:
    from tandem.kernels import triton_layer

    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    triton_layer.gate[(rows, -(-width // _BLOCK))](gate_up, out, width, BLOCK=_BLOCK)
    return out


def _gate_shapes(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


_turn = register(
    "turn_and_write(Tensor heads, Tensor turns, Tensor slots, Tensor(a!) keys, Tensor(b!) values,"
    " int query_heads, Tensor? gain, float eps) -> Tensor",
    _turn_by_operators,
    _turn_by_triton,
    _turn_shapes,
)
_gate = register(
    "gate(Tensor gate_up) -> Tensor", _gate_by_operators, _gate_by_triton, _gate_shapes
)
