"""Random numbers as a pure function of (seed, purpose, round, row).

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The
key is the request's seed; the counter is (row, round, purpose). Purposes never share a
number, and a row that a round did not use is burnt with its round: reusing a position's
number in a later round biases the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

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


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows 0..count-1 of one purpose in one round of one request.

    Attributes:
        seed: the request's, 64 bits.
        purpose: what they decide.
        round: the round's number, 64 bits.
        count: how many.
    """

    seed: int
    purpose: Purpose
    round: int
    count: int


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


def _words(draws: Sequence[Draws]) -> npt.NDArray[np.uint64]:
    """[4, sum of counts] random words, one request's rows after the other's."""
    rows = [
        (row, d.round & 0xFFFFFFFF, d.round >> 32, d.purpose, d.seed & 0xFFFFFFFF, d.seed >> 32)
        for d in draws
        for row in range(d.count)
    ]
    columns = np.array(rows, dtype=np.uint64).reshape(-1, 6).T
    return philox4x32(columns[:4], columns[4:])


def uniforms(*draws: Draws) -> npt.NDArray[np.float64]:
    """Uniforms in [0, 1) with 53 bits, of all draws in their order. 0 does occur.

    24 bits would never draw some 43,000 tokens of a plausible row of 128,256.

    Returns:
        [sum of counts] float64.
    """
    words = _words(draws)
    bits = (words[0] >> np.uint64(5) << np.uint64(26)) | (words[1] >> np.uint64(6))
    values: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return values


def integers(*draws: Draws) -> list[int]:
    """Uniform 64-bit integers, of all draws in their order."""
    words = _words(draws)
    numbers: list[int] = (words[0] | words[1] << _SHIFT).tolist()
    return numbers


T = TypeVar("T")


class Lookahead(Generic[T]):
    """A request's random numbers, computed while nobody waits for them.

    Some numbers of a round cost 0.1 ms and more, and are known before the round begins.

    Args:
        compute: from a round and a count of rows; a pure function.
    """

    def __init__(self, compute: Callable[[int, int], T]) -> None:
        self._compute = compute
        self._ready: tuple[tuple[int, int], T] | None = None

    def prepare(self, round_: int, count: int) -> None:
        """Compute what `take` is likely to be asked for next."""
        self._ready = (round_, count), self._compute(round_, count)

    def take(self, round_: int, count: int) -> T:
        """The numbers of a round, whether or not they were foreseen."""
        ready = self._ready
        if ready is not None and ready[0] == (round_, count):
            return ready[1]
        return self._compute(round_, count)
