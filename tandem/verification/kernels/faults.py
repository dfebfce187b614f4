"""What is wrong in the rows of drafts that came from elsewhere, looked for in many at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numba import boolean, int64, uint16, uint32

from tandem.speculation.draft import Draft
from tandem.speculation.kernel import kernel, readonly


def faults(drafts: Sequence[Draft], vocab_size: int) -> dict[int, str]:
    """What is wrong in the rows of drafts of sound shape, by index of the draft; mostly empty."""
    found = {
        b: drafts[b].fault_of_rows(vocab_size)
        for b in _unsound(drafts, range(len(drafts)), vocab_size)
    }
    return {b: fault for b, fault in found.items() if fault}


def _unsound(drafts: Sequence[Draft], places: range, vocab_size: int) -> list[int]:
    """Indices of faulty drafts. All are checked together; if that fails, each half is. With one bad
    draft in a batch, this costs a fraction of checking each draft separately."""
    looked_at = [draft for draft in drafts[places.start : places.stop] if len(draft.ids)]
    if not looked_at or _sound(looked_at, vocab_size):
        return []
    if len(places) == 1:
        return list(places)
    half = len(places) // 2
    return [
        *_unsound(drafts, places[:half], vocab_size),
        *_unsound(drafts, places[half:], vocab_size),
    ]


def _sound(drafts: Sequence[Draft], vocab_size: int) -> bool:
    sizes = [size for draft in drafts for size in draft.sizes]
    row_of: Sequence[int] = range(len(sizes))
    if not all(draft.is_chain for draft in drafts):
        firsts = accumulate((len(draft.sizes) for draft in drafts), initial=0)
        row_of = [
            first + row
            for draft, first in zip(drafts, firsts, strict=False)
            for row in draft.rows_of_nodes()
        ]
    return bool(
        _sound_rows(
            np.array([token_id for draft in drafts for token_id in draft.token_ids]),
            np.array(row_of),
            np.array(sizes),
            np.concatenate([draft.ids for draft in drafts]),
            np.concatenate([draft.weights for draft in drafts]),
            vocab_size,
        )
    )


@kernel(
    boolean(
        readonly(int64),
        readonly(int64),
        readonly(int64),
        readonly(uint32),
        readonly(uint16),
        int64,
    )
)
def _sound_rows(
    token_ids: Any, row_of: Any, sizes: Any, ids: Any, weights: Any, vocab_size: Any
) -> Any:
    """Whether ids are of the vocabulary and once in each row, weights positive, and each node's
    token in its row unless that is certain."""
    ends = np.cumsum(sizes)
    row_with = np.full(vocab_size, -1, np.int32)  # the last row that had each id
    for row in range(len(sizes)):
        for k in range(ends[row] - sizes[row], ends[row]):
            if ids[k] >= vocab_size or weights[k] == 0 or row_with[ids[k]] == row:
                return False
            row_with[ids[k]] = row
    for node in range(len(token_ids)):
        end = ends[row_of[node]]
        first = end - sizes[row_of[node]]
        found = first == end
        for k in range(first, end):
            found = found or ids[k] == token_ids[node]
        if not found:
            return False
    return True
