# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The kernel of `attention.py`. Triton is imported with this file, which only a GPU needs."""

import triton
import triton.language as tl

# Arguments whose values differ from batch to batch; the alignment of `tiles`, `rows` and `counts`
# does too. A kernel for each value or alignment would be compiled while texts wait.
_VARYING = ["num_tiles", "num_rows", "words", "least"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=["tiles", "rows", "counts"])
def attend(
    query,
    keys,
    values,
    out,
    parts,
    stats,
    counts,
    tiles,
    rows,
    scale,
    softcap,
    query_row,
    query_head,
    key_head,
    key_position,
    value_head,
    value_position,
    num_tiles,
    num_rows,
    words,
    least,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WIDE: tl.constexpr,
    WIDE_V: tl.constexpr,
    PARTS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    CAP: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """A part of a tile's queries, one key head, one split of the positions; online softmax in
    float32.

    The last split of a tile to end merges all of them, in their order: results do not depend on the
    order in which they end.
    """
    part, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tile, skipped = part // PARTS, part % PARTS * M
    row0 = tl.load(tiles + tile).to(tl.int32)
    count = tl.load(tiles + num_tiles + tile).to(tl.int32)
    low = tl.load(tiles + 2 * num_tiles + tile).to(tl.int32)
    high = tl.load(tiles + 3 * num_tiles + tile).to(tl.int32)
    base = tl.load(tiles + 4 * num_tiles + tile).to(tl.int32)
    behind = tl.load(tiles + 5 * num_tiles + tile).to(tl.int32)
    blocks = tl.cdiv(high - low, N)
    # Few positions are not worth a split of their own.
    each = tl.maximum(tl.cdiv(blocks, tl.num_programs(2)), least)
    used = tl.maximum(tl.cdiv(blocks, each), 1)
    if (skipped < count * G) & (split < used):
        m = tl.arange(0, M)
        row, group = row0 + (skipped + m) // G, (skipped + m) % G
        live = (skipped + m) // G < count
        d, dv = tl.arange(0, WIDE), tl.arange(0, WIDE_V)
        at = query + row.to(tl.int64) * query_row + (head * G + group) * query_head
        asked = tl.load(at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
        first = tl.load(rows + row, mask=live, other=0).to(tl.int32)
        last = tl.load(rows + num_rows + row, mask=live, other=-1).to(tl.int32)
        own_keys = keys + head.to(tl.int64) * key_head
        own_values = values + head.to(tl.int64) * value_head
        acc = tl.zeros((M, WIDE_V), tl.float32)
        top = tl.full((M,), -float("inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        begin = low + split * each * N
        end = tl.minimum(begin + each * N, high)
        for start in range(begin, end, N):
            p = start + tl.arange(0, N)
            there = p < end
            # Not transposed: positions are rows in memory.
            k = tl.load(
                own_keys + (p.to(tl.int64) * key_position)[None, :] + d[:, None],
                mask=there[None, :] & (d < D)[:, None],
                other=0.0,
            )
            score = tl.dot(asked, k, input_precision="ieee") * scale
            if CAP:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            sees = (p[None, :] >= first[:, None]) & (p[None, :] <= last[:, None])
            if start + N > base:
                off = p - base
                inside = (off >= 0) & (off < behind) & there
                word = tl.load(
                    rows + 2 * num_rows + (row * words)[:, None] + (off >> 5)[None, :],
                    mask=live[:, None] & inside[None, :],
                    other=0,
                )
                sees = sees | (((word >> (off & 31)[None, :].to(tl.int64)) & 1) > 0)
            sees = sees & there[None, :] & live[:, None]
            score = tl.where(sees, score * 1.4426950408889634, -float("inf"))
            new = tl.maximum(top, tl.max(score, 1))
            safe = tl.where(new == -float("inf"), 0.0, new)
            weight = tl.exp2(score - safe[:, None])
            keep = tl.exp2(top - safe)
            total = total * keep + tl.sum(weight, 1)
            v = tl.load(
                own_values + (p.to(tl.int64) * value_position)[:, None] + dv[None, :],
                mask=there[:, None] & (dv < DV)[None, :],
                other=0.0,
            )
            acc = acc * keep[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            top = new
        place = (row * H + head) * G + group
        whole = out + place.to(tl.int64)[:, None] * DV + dv[None, :]
        wanted = live[:, None] & (dv < DV)[None, :]
        if SPLIT:
            spot = (split * tl.num_programs(0) + part).to(tl.int64) * H + head
            own = parts + (spot * M + m)[:, None] * WIDE_V + dv[None, :]
            own_stat = stats + (spot * M + m) * 2
            if used > 1:
                tl.store(own, acc)
                tl.store(own_stat, top)
                tl.store(own_stat + 1, total)
                tl.debug_barrier()
                ended = tl.atomic_add(counts + part * H + head, 1, sem="acq_rel")
                if ended == used - 1:
                    top = tl.full((M,), -float("inf"), tl.float32)
                    total = tl.zeros((M,), tl.float32)
                    acc = tl.zeros((M, WIDE_V), tl.float32)
                    for i in range(used):
                        spot = (i * tl.num_programs(0) + part).to(tl.int64) * H + head
                        at_i = spot * M + m
                        top_i = tl.load(stats + at_i * 2, cache_modifier=".cg")
                        total_i = tl.load(stats + at_i * 2 + 1, cache_modifier=".cg")
                        piece = tl.load(
                            parts + at_i[:, None] * WIDE_V + dv[None, :], cache_modifier=".cg"
                        )
                        new = tl.maximum(top, top_i)
                        safe = tl.where(new == -float("inf"), 0.0, new)
                        keep, add = tl.exp2(top - safe), tl.exp2(top_i - safe)
                        total = total * keep + total_i * add
                        acc = acc * keep[:, None] + piece * add[:, None]
                        top = new
                    tl.store(counts + part * H + head, 0)
                    share = acc / tl.where(total == 0.0, 1.0, total)[:, None]
                    tl.store(whole, share.to(out.dtype.element_ty), mask=wanted)
            else:
                share = acc / tl.where(total == 0.0, 1.0, total)[:, None]
                tl.store(whole, share.to(out.dtype.element_ty), mask=wanted)
        else:
            share = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(whole, share.to(out.dtype.element_ty), mask=wanted)
