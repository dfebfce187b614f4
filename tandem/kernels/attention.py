"""Attention of a whole batch in one call, over the pool in place."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.kernels.operators import register

# Bits of a word of a mask, which has a bit for each branch row.
WORD = 32
# Counters of a tile. Each counts the splits that have ended, for one key head and one part of the
# queries; a tile with more of these is not split.
COUNTED = 128
# Programs that keep a device busy: two for each processor of the largest cards.
_PROGRAMS = 320
_MOST_SPLITS = 32
# Fewest blocks of positions that are worth a split of their own.
_LEAST = 2
# Most queries of a program, which come from its rows and from the heads that share a key head. Keys
# in float32, or wider than 128, leave room for fewer. With more, or with eight warps instead of
# four, attention took twice as long on an H100.
_MOST_QUERIES = 64
# Shared memory for keys and values in flight: the smallest cards have 99 KiB in all.
_IN_FLIGHT = 64 * 1024
_MOST_STAGES = 4


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    rows: Tensor,
    counts: Tensor,
    size: int,
    words: int,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """Attention of the rows of many texts, each to its own slots of the pool.

    Args:
        query: [Hq, T, D].
        keys: [H, positions, D].
        values: [H, positions, Dv].
        tiles: [6, tiles] int64, of each tile: its first row, and its number of rows; the first slot
            of the pool that any of these sees, and the slot after the last; the slot of its first
            branch row, and the number of these.
        rows: [2 + words, T] int64: the first and the last trunk slot that each row sees, -1 if
            none; then, in memory [T, words], masks of the branch rows that it sees, the lowest bit
            for the first one.
        counts: [tiles, COUNTED] int32 zeros, which are zeros again afterwards.
        size: most rows of a tile.
        words: of a row's mask, each of `WORD` bits.
        scale: of the scores.
        softcap: bounds the scores as softcap * tanh(score / softcap); 0 for no bound.

    Returns:
        [T, Hq, Dv]; rows of no tile are arbitrary.
    """
    found: Tensor = _operator(query, keys, values, tiles, rows, counts, size, words, scale, softcap)
    return found


def _by_operators(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    rows: Tensor,
    counts: Tensor,
    size: int,
    words: int,
    scale: float,
    softcap: float,
) -> Tensor:
    """The reference: tile by tile, and only the slots that the tile says are read."""
    heads, groups = len(keys), len(query) // len(keys)
    count = rows.shape[1]
    first, last = rows[0], rows[1]
    bits = rows[2:].reshape(count, words)
    out = query.new_zeros(query.shape[1], heads, groups, values.shape[2])
    for row, length, low, high, base, behind in tiles.T.tolist():
        if not length:
            continue
        own = slice(row, row + length)
        slots = torch.arange(low, high, device=query.device)
        sees = (slots >= first[own, None]) & (slots <= last[own, None])
        off = slots - base
        inside = (off >= 0) & (off < behind)
        at = torch.where(inside, off, 0)
        word = bits[own].index_select(1, at // WORD)
        sees = sees | (inside & (((word >> (at % WORD)) & 1) > 0))
        asked = _wide(query[:, own].reshape(heads, groups, length, -1))
        scores = asked @ _wide(keys[:, None, low:high]).transpose(-1, -2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num(0)
        seen = weights @ _wide(values[:, None, low:high])
        out[own] = seen.permute(2, 0, 1, 3).to(out.dtype)
    return out.flatten(1, 2)


def _wide(states: Tensor) -> Tensor:
    """In float32 at least."""
    return states if states.dtype == torch.float64 else states.float()


def _by_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    rows: Tensor,
    counts: Tensor,
    size: int,
    words: int,
    scale: float,
    softcap: float,
) -> Tensor:
    """See `attend`."""
    from tandem.kernels import triton_attention

    heads, groups = len(keys), len(query) // len(keys)
    width, value_width = keys.shape[2], values.shape[2]
    wide, wide_v = (max(16, 1 << (w - 1).bit_length()) for w in (width, value_width))
    num_tiles, num_rows = tiles.shape[1], rows.shape[1]
    most = 16 if keys.element_size() == 4 else 32 if wide > 128 else _MOST_QUERIES
    queries = min(most, max(16, 1 << (size * groups - 1).bit_length()))
    parts_of_tile = -(-size * groups // queries)
    programs = num_tiles * parts_of_tile * heads
    splits = max(1, min(_MOST_SPLITS, _PROGRAMS // programs))
    splits = 1 << (splits.bit_length() - 1)
    if parts_of_tile * heads > counts.shape[1]:
        splits = 1
    block, stages = _blocks(queries, wide + wide_v, keys.element_size())
    out = query.new_empty(query.shape[1], heads * groups, value_width)
    shared = splits > 1
    at = (splits * num_tiles * parts_of_tile * heads * queries) if shared else 0
    parts = torch.empty(at * wide_v, dtype=torch.float32, device=query.device)
    stats = torch.empty(at * 2, dtype=torch.float32, device=query.device)
    triton_attention.attend[(num_tiles * parts_of_tile, heads, splits)](
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
        query.stride(1),
        query.stride(0),
        *keys.stride()[:2],
        *values.stride()[:2],
        num_tiles,
        num_rows,
        words,
        _LEAST,
        H=heads,
        G=groups,
        D=width,
        DV=value_width,
        WIDE=wide,
        WIDE_V=wide_v,
        PARTS=parts_of_tile,
        M=queries,
        N=block,
        CAP=softcap > 0,
        SPLIT=shared,
        num_warps=4,
        num_stages=stages,
    )
    return out


def _blocks(queries: int, width: int, size: int) -> tuple[int, int]:
    """Positions of a block, and blocks in flight.

    Args:
        queries: of a program.
        width: numbers of a key and its value.
        size: bytes of a number.
    """
    block = 16 if size == 4 else 64 if queries <= 32 else 32
    while block > 16 and 2 * block * width * size > _IN_FLIGHT:
        block //= 2
    return block, max(1, min(_MOST_STAGES, _IN_FLIGHT // (block * width * size)))


def _shapes(query: Tensor, keys: Tensor, values: Tensor, *others: object) -> Tensor:
    devices = {each.device for each in (query, keys, values, *others) if isinstance(each, Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"attention of tensors on more than one device: {devices}")
    return query.new_empty(query.shape[1], query.shape[0], values.shape[2])


_operator = register(
    "attend(Tensor query, Tensor keys, Tensor values, Tensor tiles, Tensor rows,"
    " Tensor(a!) counts, int size, int words, float scale, float softcap) -> Tensor",
    _by_operators,
    _by_triton,
    _shapes,
)
