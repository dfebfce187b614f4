"""A text as a store of its own: prompt lookup (Saxena 2023), and Max-Gram where bigrams stand
after it (Chen et al., arXiv 2312.11462, section 3.2)."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tandem.retrieval.store import MOST_OCCURRENCES, Continuations


class PromptStore:
    """Finds the last tokens of a text in the text before.

    Args:
        longest: match that is looked for, in tokens.
        window: the text's last tokens, which are searched.
    """

    def __init__(self, longest: int, window: int) -> None:
        self._longest = longest
        self._window = window

    def continuations(self, text: Sequence[int], depth: int) -> Iterator[Continuations]:
        """See `TextStore`; of one match the latest places are taken."""
        searched = np.frombuffer(array("q", text[-self._window :]), np.int64)
        matches: list[npt.NDArray[np.int64]] = []
        # Places after an earlier token that is the text's last one; then after longer matches.
        ends = np.flatnonzero(searched[:-1] == searched[-1]) + 1
        for length in range(2, self._longest + 2):
            if not len(ends):
                break
            matches.append(ends[: -MOST_OCCURRENCES - 1 : -1])  # of equal ones the latest first
            ends = ends[ends >= length]
            ends = ends[searched[ends - length] == searched[-length]] if len(ends) else ends
        behind = np.arange(depth)
        for ends in reversed(matches):
            places = ends[:, None] + behind
            inside = places < len(searched)
            yield np.where(inside, searched[np.where(inside, places, 0)], -1)
