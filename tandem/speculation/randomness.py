"""Random numbers as a pure function of (seed, purpose, round, row).

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The
key is the request's seed; the counter is (row, round, purpose). Purposes never share a
number, and a row that a round did not use is burnt with its round: reusing a position's
number in a later round biases the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
# What is added to the key in each round.
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_BUMPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL


class Purpose(IntEnum):
    """What a random number decides."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox4x32(
    counters: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Philox 4x32-10 of each counter under its key.

    Args:
        counters: [4, N] 32-bit words.
        keys: [2, N] 32-bit words.

    Returns:
        [4, N] 32-bit words.
    """
    # Two lanes at once: the low and the high half of each product go to the other lane.
    even, odd = counters[0::2], counters[1::2]
    for key in (keys + _BUMPS) & _MASK:
        products = (even * _MULTIPLIERS)[::-1]
        even, odd = (products >> _SHIFT) ^ odd ^ key, products & _MASK
    return np.stack((even[0], odd[0], even[1], odd[1]))


# From words to numbers, one row of words [4, ...] a number.
Form = Callable[[npt.NDArray[np.uint64]], npt.NDArray[Any]]


def uniforms(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Uniforms in [0, 1) with 53 bits, of words [4, ...]. 0 does occur.

    24 bits would never draw some 43,000 tokens of a plausible row of 128,256.
    """
    bits = (words[0] >> np.uint64(5) << np.uint64(26)) | (words[1] >> np.uint64(6))
    values: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return values


def digits(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Uniform 64-bit integers as their low and high 32-bit digits [..., 2], of words [4, ...]."""
    return np.stack((words[0], words[1]), -1).astype(np.int64)


class Foreseen:
    """A request's random numbers of one purpose, computed for many rounds at a time.

    A call of Philox costs some 70 microseconds for one number and about as much for a hundred.

    Args:
        seed: the request's, 64 bits.
        purpose: what they decide.
        form: what they are made into.
    """

    def __init__(self, seed: int, purpose: Purpose, form: Form) -> None:
        self._key = (seed & 0xFFFFFFFF, seed >> 32)
        self._purpose = purpose
        self._form = form
        self._first = 0
        self._numbers: npt.NDArray[Any] | None = None  # [rounds, rows, ...]

    def take(self, round_: int, count: int) -> npt.NDArray[Any]:
        """Rows 0..count-1 of a round, [count, ...]; those that were not foreseen are computed."""
        if not self.covers(round_, count):
            foresee([(self, round_, count)])
        assert self._numbers is not None
        row: npt.NDArray[Any] = self._numbers[round_ - self._first, :count]
        return row

    def covers(self, round_: int, count: int) -> bool:
        """Whether the numbers are there already."""
        numbers, place = self._numbers, round_ - self._first
        return numbers is not None and (0 <= place < len(numbers) and count <= numbers.shape[1])


# Rounds that are foreseen: many enough to make a call's share small, few enough to waste little
# of it on a text that ends.
_ROUNDS_AHEAD = 16


def foresee(wanted: Sequence[tuple[Foreseen, int, int]]) -> None:
    """Compute the numbers of many requests in one call: from a round on, so many rows a round."""
    counters, keys, shapes = [], [], []
    for foreseen, round_, count in wanted:
        rows, rounds = np.meshgrid(
            np.arange(count, dtype=np.uint64),
            # Behind the last 64-bit number comes 0, which no text has left to ask for.
            np.arange(_ROUNDS_AHEAD, dtype=np.uint64) + np.uint64(round_),
        )
        purpose = np.full_like(rows, foreseen._purpose)
        counter = np.stack((rows, rounds & _MASK, rounds >> _SHIFT, purpose)).reshape(4, -1)
        counters.append(counter)
        keys.append(np.repeat(np.array(foreseen._key, np.uint64)[:, None], counter.shape[1], 1))
        shapes.append(rows.shape)
    words = philox4x32(np.concatenate(counters, 1), np.concatenate(keys, 1))
    start = 0
    for (foreseen, round_, _), shape in zip(wanted, shapes, strict=True):
        end = start + shape[0] * shape[1]
        foreseen._first = round_
        foreseen._numbers = foreseen._form(words[:, start:end].reshape(4, *shape))
        start = end
