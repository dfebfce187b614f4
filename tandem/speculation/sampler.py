"""Truncates, rounds and draws on a CPU in one kernel, with the results of `categorical.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import float32, int64, uint16, uint32, void

from tandem.speculation.categorical import MAX_WEIGHT, likeliest_keys
from tandem.speculation.kernel import kernel, readonly

_LARGEST = np.float32(MAX_WEIGHT)


@kernel()
def _cut(keys: Any, probs: Any, mass: Any, ids: Any, weights: Any) -> Any:
    """Fill a row's ids and weights; return the sum of the weights."""
    total, before = 0, 0.0
    largest = probs[keys[0] & 0xFFFFFFFF]
    for i in range(len(keys)):
        place = keys[i] & 0xFFFFFFFF
        ids[i] = place
        value = probs[place]
        before += value
        weight = 0
        # The mass before the likeliest token is 0, so that token is always kept.
        if not np.float32(np.float32(before) - value) >= mass:
            scaled = np.rint(np.float32(value / largest) * _LARGEST)
            if scaled > 0:  # NaN gets no weight
                weight = int(scaled)
        weights[i] = weight
        total += weight
    return total


@kernel()
def _first_beyond(weights: Any, point: Any) -> Any:
    """The first place whose partial sum is above a point; the last place if no sum is."""
    reached = 0
    for i in range(len(weights)):
        reached += weights[i]
        if reached > point:
            return i
    return len(weights) - 1


@kernel(
    void(
        readonly(int64, 2),
        readonly(float32, 2),
        float32,
        readonly(int64, 2),
        int64[::1],
        int64[:, ::1],
        int64[:, ::1],
    )
)
def _sample(
    keys: Any, probs: Any, mass: Any, digits: Any, tokens: Any, ids: Any, weights: Any
) -> None:
    for row in range(len(keys)):
        total = _cut(keys[row], probs[row], mass, ids[row], weights[row])
        # floor(bits * total / 2**64), digit by digit.
        point = (digits[row, 0] * total) >> 32
        point = (point + digits[row, 1] * total) >> 32
        tokens[row] = ids[row, _first_beyond(weights[row], point)]


def sample(
    probs: npt.NDArray[np.float32], mass: float, support: int, digits: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The results of `Categorical.quantize` and `draw` for the same rows.

    Args:
        probs: [B, V].
        mass: the share to cover.
        support: the most tokens K to keep, >= 1. For one multiplication per digit,
            K * 65535 < 2**31 is required.
        digits: [B, 2], the low and high 32-bit digits of uniform 64-bit integers.

    Returns:
        Tokens [B], and the rows that they were drawn from: ids and weights [B, K].
    """
    keys = likeliest_keys(probs, min(support, probs.shape[1]))
    tokens = np.empty(len(keys), np.int64)
    ids, weights = np.empty(keys.shape, np.int64), np.empty(keys.shape, np.int64)
    _sample(keys, probs, np.float32(mass), digits, tokens, ids, weights)
    return tokens, ids, weights


@kernel(
    int64(
        readonly(int64, 2),
        readonly(int64, 2),
        readonly(int64),
        int64[::1],
        uint32[::1],
        uint16[::1],
    )
)
def _pack(ids: Any, weights: Any, rows: Any, sizes: Any, sent: Any, sent_weights: Any) -> Any:
    end = 0
    for place in range(len(rows)):
        row, first = rows[place], end
        for k in range(ids.shape[1]):
            sent[end] = ids[row, k]
            sent_weights[end] = weights[row, k]
            end += weights[row, k] > 0
        sizes[place] = end - first
    return end


def entries_of(
    ids: npt.NDArray[np.int64], weights: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
    """What is sent of some rows: how many entries each has, then the ids and weights of them all.

    Args:
        ids: [R, K].
        weights: [R, K], 0 for padding.
        rows: which are sent, in order.
    """
    sizes, most = np.empty(len(rows), np.int64), len(rows) * ids.shape[1] + 1
    sent, sent_weights = np.empty(most, np.uint32), np.empty(most, np.uint16)
    ids, weights = np.ascontiguousarray(ids), np.ascontiguousarray(weights)
    end = _pack(ids, weights, rows, sizes, sent, sent_weights)
    return sizes, sent[:end].copy(), sent_weights[:end].copy()
