"""Random numbers as a pure function of (seed, purpose, round, row).

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The
key is the request's seed; the counter is (row, round, purpose). Purposes never share a
number, and a row that a round did not use is burnt with its round: reusing a position's
number in a later round biases the text.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10


class Purpose(IntEnum):
    """What a random number decides."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def philox4x32(counters: npt.NDArray[np.uint32], key: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Philox 4x32-10 of each counter.

    Args:
        counters: [N, 4] uint32.
        key: two 32-bit words.

    Returns:
        [N, 4] uint32.
    """
    words = counters.astype(np.uint64)
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products of words 0 and 2 with their multipliers, as 64-bit numbers.
        products = words[:, ::2] * _MULTIPLIERS
        high, low = products >> _SHIFT, products & _MASK
        words = np.stack(
            (
                high[:, 1] ^ words[:, 1] ^ np.uint64(k0),
                low[:, 1],
                high[:, 0] ^ words[:, 3] ^ np.uint64(k1),
                low[:, 0],
            ),
            axis=1,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return words.astype(np.uint32)


def _words(seed: int, purpose: Purpose, round_: int, count: int) -> npt.NDArray[np.uint64]:
    counters = np.empty((count, 4), dtype=np.uint32)
    counters[:, 0] = np.arange(count)
    counters[:, 1] = round_ & 0xFFFFFFFF
    counters[:, 2] = round_ >> 32
    counters[:, 3] = purpose
    return philox4x32(counters, (seed & 0xFFFFFFFF, seed >> 32)).astype(np.uint64)


def uniforms(seed: int, purpose: Purpose, round_: int, count: int) -> npt.NDArray[np.float64]:
    """Uniforms in [0, 1) of rows 0..count-1, with 53 bits. 0 does occur.

    24 bits would never draw some 43,000 tokens of a plausible row of 128,256.

    Returns:
        [count] float64.
    """
    words = _words(seed, purpose, round_, count)
    bits = (words[:, 0] >> np.uint64(5) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53


def integers(seed: int, purpose: Purpose, round_: int, count: int) -> list[int]:
    """Uniform 64-bit integers of rows 0..count-1."""
    words = _words(seed, purpose, round_, count)
    return [int(low) | int(high) << 32 for low, high in words[:, :2]]
