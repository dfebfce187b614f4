"""An index of texts as a store (REST, He et al., arXiv 2311.08252), and its table of bigrams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import structlog

from tandem.retrieval.index import Index
from tandem.retrieval.store import MOST_OCCURRENCES, Continuations

_log = structlog.get_logger(__name__)


class OpenIndex:
    """An index that serves until its files change; then it gives one warning, and nothing more."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._serves = True

    @property
    def serves(self) -> bool:
        """Whether the index may be read."""
        if self._serves and not self.index.unchanged:
            self._serves = False
            _log.warning(
                "the index has changed on disk and is not used any more; restart to read it"
            )
        return self._serves


class CorpusStore:
    """Finds the last tokens of a text in an index.

    Args:
        opened: the index.
        longest: match that is looked for, in tokens.
    """

    def __init__(self, opened: OpenIndex, longest: int) -> None:
        self._opened = opened
        self._longest = longest

    def continuations(self, text: Sequence[int], depth: int) -> Iterator[Continuations]:
        """See `TextStore`; of one match at most `MOST_OCCURRENCES` places are taken, evenly."""
        if not self._opened.serves:
            return
        index, size = self._opened.index, self._opened.index.about.vocab_size
        known = 0
        for token_id in reversed(text[-self._longest :]):
            if token_id >= size:
                break
            known += 1
        # The longest match is found by halves: what has a match has shorter ones.
        least, most = 0, known
        found: dict[int, range] = {}
        while least < most:
            length = (least + most + 1) // 2
            found[length] = index.find(text[-length:])
            least, most = (length, most) if found[length] else (least, length - 1)
        taken = 0
        for length in range(least, 0, -1):
            places = found[length] if length in found else index.find(text[-length:])
            if len(places) > taken:
                taken = len(places)
                yield index.behind(places, length, depth, MOST_OCCURRENCES)


class BigramStore:
    """Goes on with the token that most often followed the last one in an index, and so on.

    Args:
        opened: the index.
    """

    def __init__(self, opened: OpenIndex) -> None:
        self._opened = opened

    def continuations(self, text: Sequence[int], depth: int) -> Iterator[Continuations]:
        """See `TextStore`; one continuation."""
        if not self._opened.serves:
            return
        bigrams, chain = self._opened.index.bigrams, [text[-1]]
        while len(chain) <= depth and chain[-1] < len(bigrams):
            following = int(bigrams[chain[-1]])
            if following >= len(bigrams):  # the token was never followed by one
                break
            chain.append(following)
        if len(chain) > 1:
            row = np.full((1, depth), -1, np.int64)
            row[0, : len(chain) - 1] = chain[1:]
            yield row
