"""The sparse categorical with integer weights: small on the wire, and exact.

The drafter truncates and rounds its distribution first and samples from the result, so the
target can rebuild the very distribution that a token came from. Truncation may cost
acceptance, never correctness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_WEIGHT = 65535


@dataclass(frozen=True, slots=True)
class Categorical:
    """A distribution over token ids: weight / sum of weights, 0 elsewhere.

    Attributes:
        ids: [K] uint32, distinct.
        weights: [K] uint16, each >= 1, the largest 65535.
    """

    ids: npt.NDArray[np.uint32]
    weights: npt.NDArray[np.uint16]

    def draw(self, bits: int) -> int:
        """Draw a token by integer arithmetic.

        Args:
            bits: a uniform 64-bit integer. (A full row's weights can add up to more than
                2**32, so 32 bits would not reach every token.)
        """
        sums = self.weights.cumsum(dtype=np.int64)
        point = bits * int(sums[-1]) >> 64
        return int(self.ids[np.searchsorted(sums, point, side="right")])
