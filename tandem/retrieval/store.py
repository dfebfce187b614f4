"""What every store answers: how texts went on after the last tokens of a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

# Continuations of one match that are looked at. More hardly change which are the most frequent, and
# a look-up has to take less than a drafter's pass.
MOST_OCCURRENCES = 64

# [occurrences, depth] token ids, -1 after a continuation's end.
Continuations = npt.NDArray[np.int64]


class TextStore(Protocol):
    """Token ids that were seen."""

    def continuations(self, text: Sequence[int], depth: int) -> Iterator[Continuations]:
        """What followed where the last tokens of a text were seen: first for the longest match,
        then for shorter ones, as long as the caller goes on asking.

        Args:
            text: token ids, at least one.
            depth: most tokens of a continuation, at least 1.
        """
