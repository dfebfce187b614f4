"""Tokens of a text in flight: each has gone through some of the groups of a model's layers.

Predictive pipelined decoding (PPD, Yang et al., arXiv 2307.05908) has two groups, the layers up to
an exit and those after it. SPEED (Hooper et al., arXiv 2310.12072) has one group of layers, which
a token goes through several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem.inference.feed import Feed, TokenInFlight

if TYPE_CHECKING:
    from tandem.inference.kv.pool import SequenceCache


@dataclass(eq=False)
class Flight:
    """The last emitted token of a text, and guesses of what follows.

    They are branch rows of the text's cache. Nothing else may be fed to it in between, or the
    flight has to be dropped.

    Attributes:
        tokens: of the rows, in their order; the first one is emitted.
        parents: the row that each hangs at, from 1; 0 for the first one.
        last: the last token's row of the pass before, as the engine answered; None where it is not
            at hand.
    """

    tokens: list[TokenInFlight]
    parents: list[int] = field(default_factory=lambda: [0])
    last: Any = None

    @classmethod
    def of(cls, last_token: int) -> Flight:
        """That of a text whose last token is about to be computed."""
        return cls([TokenInFlight(last_token)])

    def feed(self, cache: SequenceCache, exit_: int) -> Feed:
        """Each token through its next group. Rows are wanted after `exit_` groups and more: those
        of the first tokens, since the later ones have gone through no more groups."""
        token_ids = [one.token_id for one in self.tokens]
        rows = sum(one.through + 1 >= exit_ for one in self.tokens)
        return Feed(cache, token_ids, rows, self.parents, flight=self.tokens)

    def guess(self, token_ids: Sequence[int]) -> None:
        """Add guesses of the token after the last one; the tokens so far are in a line."""
        behind = len(self.tokens)
        assert self.parents == list(range(behind))
        self.tokens += map(TokenInFlight, token_ids)
        self.parents += [behind] * len(token_ids)

    def go_on(self, cache: SequenceCache, token_id: int) -> list[int]:
        """The first token is computed whole, and another one was emitted after it.

        Args:
            cache: its trunk grows by the first token.
            token_id: that was emitted.

        Returns:
            Rows that stay, from 0 as they were counted before: the guess that was right, and what
            hangs at it; none where no guess was.
        """
        kept: list[int] = []
        for row, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), 1):
            right = parent == 1 and token.token_id == token_id and not kept
            if right or parent in kept:
                kept.append(row)
        cache.keep([1], kept)
        numbers = {row: number for number, row in enumerate(kept, 1)}
        self.parents = [numbers.get(self.parents[row - 1], 0) for row in kept]
        self.tokens = [self.tokens[row - 1] for row in kept]
        return [row - 1 for row in kept]
