# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The kernels of `layer.py`. Triton is imported with this file, which only a GPU needs."""

import triton
import triton.language as tl


# Slots follow the positions in one tensor, so the number of rows decides whether they are aligned.
@triton.jit(do_not_specialize_on_alignment=["slots"])
def turn_and_write(
    heads,
    turns,
    slots,
    gain,
    query,
    keys,
    values,
    eps,
    row_stride,
    key_head,
    key_position,
    value_head,
    value_position,
    HQ: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    NORM: tl.constexpr,
):
    """One head of one row: queries are turned, keys too and written, values are written."""
    row, head = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, WIDE // 2)
    on = half < D // 2
    at = heads + row.to(tl.int64) * row_stride + head * D + 2 * half
    even = tl.load(at, mask=on, other=0.0).to(tl.float32)
    odd = tl.load(at + 1, mask=on, other=0.0).to(tl.float32)
    if head < HQ + H:
        if NORM:
            size = tl.rsqrt(tl.sum(even * even + odd * odd, 0) / D + eps)
            even *= size * tl.load(gain + head * D + 2 * half, mask=on, other=0.0).to(tl.float32)
            odd *= size * tl.load(gain + head * D + 2 * half + 1, mask=on, other=0.0).to(tl.float32)
        cos = tl.load(turns + row * D + 2 * half, mask=on, other=0.0)
        sin = tl.load(turns + row * D + 2 * half + 1, mask=on, other=0.0)
        even, odd = even * cos - odd * sin, even * sin + odd * cos
    slot = tl.load(slots + row).to(tl.int64)
    if head < HQ:
        to = query + (row.to(tl.int64) * HQ + head) * D + 2 * half
        tl.store(to, even.to(query.dtype.element_ty), mask=on)
        tl.store(to + 1, odd.to(query.dtype.element_ty), mask=on)
    elif head < HQ + H:
        to = keys + (head - HQ).to(tl.int64) * key_head + slot * key_position + 2 * half
        tl.store(to, even.to(keys.dtype.element_ty), mask=on)
        tl.store(to + 1, odd.to(keys.dtype.element_ty), mask=on)
    else:
        to = values + (head - HQ - H).to(tl.int64) * value_head + slot * value_position + 2 * half
        tl.store(to, even.to(values.dtype.element_ty), mask=on)
        tl.store(to + 1, odd.to(values.dtype.element_ty), mask=on)


@triton.jit
def gate(gate_up, out, width, BLOCK: tl.constexpr):
    """silu of the first half, times the second."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    on = i < width
    first = tl.load(gate_up + row * 2 * width + i, mask=on, other=0.0).to(tl.float32)
    second = tl.load(gate_up + row * 2 * width + width + i, mask=on, other=0.0).to(tl.float32)
    found = first * tl.sigmoid(first) * second
    tl.store(out + row * width + i, found.to(out.dtype.element_ty), mask=on)
