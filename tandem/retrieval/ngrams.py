"""N-grams by their first tokens: the pool of Lookahead decoding (Fu et al., arXiv 2402.02057)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from tandem.retrieval.store import Continuations


@dataclass
class NgramPool:
    """The n-grams that came last, a few for each first token.

    Attributes:
        length: tokens of an n-gram.
        each: n-grams with the same first token; of more the one that came first is forgotten.
        most: n-grams in all; of more those are forgotten whose first token was neither given one
            nor looked up for longest.
        count: n-grams that it has.
    """

    length: int
    each: int
    most: int
    count: int = 0
    _tails: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)

    def add(self, ngram: Sequence[int]) -> None:
        """Take an n-gram in, or have one that is there be the last that came."""
        first, *rest = ngram
        own, tail = self._tails.pop(first, {}), tuple(rest)
        self._tails[first] = own  # the last one now
        self.count += tail not in own
        own.pop(tail, None)
        own[tail] = None
        if len(own) > self.each:
            del own[next(iter(own))]
            self.count -= 1
        if self.count > self.most:
            self.count -= len(self._tails.pop(next(iter(self._tails))))

    def add_text(self, text: Sequence[int], begin: int) -> None:
        """Take in all n-grams of a text that end at a place from `begin` on."""
        for end in range(max(begin + 1, self.length), len(text) + 1):
            self.add(text[end - self.length : end])

    def behind(self, token_id: int, depth: int, most: int | None = None) -> list[Continuations]:
        """How n-grams go on that begin with a token, the last that came first; no more than `depth`
        tokens. Empty where there is none.

        Args:
            token_id: the first token.
            depth: at least 1.
            most: n-grams that are taken; None for all.
        """
        tails = [tail[:depth] for tail in islice(self._behind(token_id), most)]
        return [np.array(tails, np.int64)] if tails else []

    def continuations(self, text: Sequence[int], depth: int) -> Iterator[Continuations]:
        """See `TextStore`: n-grams that have the last tokens of a text."""
        for known in range(min(self.length, len(text) + 1) - 1, 0, -1):
            first, *more = text[-known:]
            matched = tuple(more)
            tails = [
                tail[known - 1 : known - 1 + depth]
                for tail in self._behind(first)
                if tail[: known - 1] == matched
            ]
            if tails:
                yield np.array(tails, np.int64)

    def _behind(self, token_id: int) -> Iterator[tuple[int, ...]]:
        """Tails of n-grams that begin with a token, the last that came first."""
        own = self._tails.pop(token_id, None)
        if own is None:
            return iter(())
        self._tails[token_id] = own  # the last one now
        return reversed(own)
