"""Random numbers as a pure function of (seed, purpose, round, row).

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The
key is the request's seed; the counter is (row, round, purpose). Purposes never share a
number, and a number that a round did not use is never used later: to reuse a position's number in
a later round would bias the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
# Added to the key in each round of Philox.
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
    # Two lanes at a time: both halves of each product go to the other lane.
    even, odd = counters[0::2], counters[1::2]
    for key in (keys + _BUMPS) & _MASK:
        products = (even * _MULTIPLIERS)[::-1]
        even, odd = (products >> _SHIFT) ^ odd ^ key, products & _MASK
    return np.stack((even[0], odd[0], even[1], odd[1]))


# Makes numbers from words [4, ...]: one number from each column of four words.
Form = Callable[[npt.NDArray[np.uint64]], npt.NDArray[Any]]


def uniforms(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Uniforms in [0, 1) with 53 bits, from words [4, ...]. 0 does occur.

    With 24 bits, some 43,000 tokens of a plausible row of 128,256 could never be drawn.
    """
    bits = (words[0] >> np.uint64(5) << np.uint64(26)) | (words[1] >> np.uint64(6))
    values: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return values


def digits(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Uniform 64-bit integers as low and high 32-bit digits [..., 2], from words [4, ...]."""
    return np.stack((words[0], words[1]), -1).astype(np.int64)


class RandomNumbers:
    """A request's random numbers of one purpose, computed for many rounds at a time.

    A call of Philox costs some 70 microseconds for one number and about as much for a hundred.

    Attributes:
        used: numbers of a round that are not handed out (again): a drafter that is asked several
            times in a round begins after them.

    Args:
        seed: of the request, 64 bits.
        purpose: of the numbers.
        form: makes the numbers from random words.
        part: of a recipe that is made of several, whose numbers these are; 0 for a single one and
            for the target.
    """

    def __init__(self, seed: int, purpose: Purpose, form: Form, part: int = 0) -> None:
        self._key = (seed & 0xFFFFFFFF, seed >> 32)
        self._purpose = purpose | part << 8
        self.used = 0
        self._form = form
        self._first = 0
        self._numbers: npt.NDArray[Any] | None = None  # [rounds, rows, ...]

    def take(self, round_: int, count: int) -> npt.NDArray[Any]:
        """The next `count` numbers of a round, [count, ...]; computed now if not foreseen."""
        if not self.covers(round_, count):
            foresee([(self, round_, count)])
        assert self._numbers is not None
        numbers = self._numbers[round_ - self._first]
        row: npt.NDArray[Any] = numbers[self.used : self.used + count]
        return row

    def covers(self, round_: int, count: int) -> bool:
        """Whether these numbers have been computed already."""
        numbers, place = self._numbers, round_ - self._first
        most = self.used + count
        return numbers is not None and (0 <= place < len(numbers) and most <= numbers.shape[1])


class VerdictNumbers(NamedTuple):
    """The uniforms of a request's verdicts.

    Attributes:
        accepting: decide about drafted tokens.
        following: draw what follows the kept ones.
    """

    accepting: RandomNumbers
    following: RandomNumbers

    @classmethod
    def of(cls, seed: int, part: int = 0) -> VerdictNumbers:
        """Those of a request; for a part of a recipe, see `RandomNumbers`."""
        return cls(
            RandomNumbers(seed, Purpose.ACCEPT, uniforms, part),
            RandomNumbers(seed, Purpose.RESIDUAL, uniforms, part),
        )


# Numbers computed ahead, and the rounds that they are for: enough to make a call's cost per round
# small, and few enough to waste little when a text ends.
_AHEAD = 1024
_LEAST_ROUNDS, _MOST_ROUNDS = 16, 64


def foresee(wanted: Sequence[tuple[RandomNumbers, int, int]]) -> None:
    """Compute numbers of many requests in one call.

    Args:
        wanted: for each request, its `RandomNumbers`, the first round, and the numbers per round.
    """
    shapes = []
    for foreseen, _, count in wanted:
        rows = foreseen.used + count
        rounds = min(max(_AHEAD // max(rows, 1), _LEAST_ROUNDS), _MOST_ROUNDS)
        shapes.append((rounds, rows))
    ends = [0, *accumulate(rounds * rows for rounds, rows in shapes)]
    counters, keys = np.empty((4, ends[-1]), np.uint64), np.empty((2, ends[-1]), np.uint64)
    places = [slice(start, end) for start, end in pairwise(ends)]
    for (foreseen, round_, _), (rounds, rows), place in zip(wanted, shapes, places, strict=True):
        row, low, high, purpose = counters[:, place].reshape(4, rounds, rows)
        # Round numbers wrap around to 0 after 64 bits, which no text ever reaches.
        numbers = (np.arange(rounds, dtype=np.uint64) + np.uint64(round_))[:, None]
        row[:], low[:], high[:] = np.arange(rows), numbers & _MASK, numbers >> _SHIFT
        purpose[:] = foreseen._purpose
        keys[0, place], keys[1, place] = foreseen._key
    words = philox4x32(counters, keys)
    for (foreseen, round_, _), shape, place in zip(wanted, shapes, places, strict=True):
        foreseen._first = round_
        foreseen._numbers = foreseen._form(words[:, place].reshape(4, *shape))
