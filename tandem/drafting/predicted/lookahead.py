"""Lookahead decoding (Fu et al., arXiv 2402.02057): n-grams of the target's own predictions.

The target computes a window of guesses beside each draft. Its predictions there are the window's
next row, and make n-grams with the rows before; those that begin with the text's last token are
drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from tandem.drafting.drafter import Drafter, DraftSequence, Recipe, Setting, Traits
from tandem.engine.asks import Steps, Truncation
from tandem.engine.scorer import Scorer
from tandem.retrieval.merged import MergedTree
from tandem.retrieval.ngrams import NgramPool
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import NO_FEEDBACK, FeedbackWanted
from tandem.speculation.probes import Probes
from tandem.speculation.tree import MOST_NODES, DraftShape

# The last tokens of a prompt that are taken in (5 to 7 ms), and the n-grams that are kept (8 MB of
# five tokens, 15 MB of sixteen).
_TEXT, _MOST = 4096, 16_384


@dataclass
class _Lookahead:
    """What is known of a sequence.

    Attributes:
        pool: of its text, and of what the target predicted.
        known: tokens of the text that the pool has.
        window: its rows, the oldest first.
        candidates: tokens of the last draft, after whose places those of its probes come.
    """

    pool: NgramPool
    known: int = 0
    window: list[list[int]] = field(default_factory=list)
    candidates: int = 0


class LookaheadDrafter(Drafter):
    """Merges n-grams to a tree of certain tokens, and has the target compute the window.

    It is not pure: what it guesses depends on all rounds before.

    Args:
        window: columns of the window; 0 has none, and drafts from the text's own n-grams.
        ngram: tokens of an n-gram; the window has one row less.
        candidates: n-grams that are drafted, and kept for each first token.
    """

    traits = Traits(shape=DraftShape.TREE)

    def __init__(self, window: int, ngram: int, candidates: int) -> None:
        self._window, self._ngram, self._candidates = window, ngram, candidates
        probes = window * (ngram - 1)
        self.traits = replace(
            self.traits,
            largest_tree=candidates * (ngram - 1),
            feedback=FeedbackWanted(top=1, everywhere=True, probes=probes)
            if window
            else NO_FEEDBACK,
        )

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Take in what was emitted, and the window's next row."""
        super().observe(sequence, emitted)
        own = sequence.state
        if own is None:
            own = sequence.state = _Lookahead(NgramPool(self._ngram, self._candidates, _MOST))
            own.known = max(len(sequence.token_ids) - _TEXT, 0)
        own.pool.add_text(sequence.token_ids, own.known)
        own.known = len(sequence.token_ids)
        if own.window:
            self._grow(own, sequence.feedback.likeliest())

    def _grow(self, own: _Lookahead, predicted: dict[int, int]) -> None:
        """The window with its next row; with all its rows it gives an n-gram a column."""
        first = own.candidates + 1 + (len(own.window) - 1) * self._window
        places = range(first, first + self._window)
        if not all(place in predicted for place in places):
            return
        own.window.append([predicted[place] for place in places])
        if len(own.window) == self._ngram:
            for column in zip(*own.window, strict=True):
                own.pool.add(column)
            del own.window[0]

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """What n-grams say; nothing where none begins with the last token."""
        yield from ()
        own, text = sequence.state, sequence.token_ids
        tree = MergedTree(min(budget, self.traits.largest_tree), sequence.vocab_size)
        tree.fill(own.pool.behind(text[-1], gamma))
        draft = Draft.certain(tree.token_ids, tree.parents)
        if not self._window:
            return draft
        if not own.window:
            # Any tokens do; these are spread over the text.
            step = max(len(text) // self._window, 1)
            own.window = [[text[column * step % len(text)] for column in range(self._window)]]
        own.candidates = len(draft)
        return replace(draft, probes=self._probes(own))

    def _probes(self, own: _Lookahead) -> Probes:
        """The first row as a chain, and each column's later ones one under the other."""
        token_ids = [token for row in own.window for token in row]
        first = own.candidates + 1
        parents = [0, *range(first, first + len(token_ids) - 1)][: self._window]
        parents += range(first, first + len(token_ids) - self._window)
        return Probes(tuple(token_ids), tuple(parents))


class LookaheadRecipe(Recipe):
    """The recipe of `lookahead`."""

    drafts: ClassVar = "a tree of n-grams of the target's own predictions; no model"
    drafter: ClassVar = LookaheadDrafter

    method: Literal["lookahead"] = "lookahead"
    window: Annotated[
        int,
        Field(ge=0, le=64),
        Setting(
            "lookahead_window",
            "columns of the window of guesses; the target computes up to LOOKAHEAD_WINDOW x"
            " (LOOKAHEAD_NGRAM - 1) further tokens with each draft. 0 has no window: drafts come"
            " from n-grams of the text alone",
        ),
    ] = 7
    ngram: Annotated[
        int,
        Field(ge=2, le=16),
        Setting("lookahead_ngram", "tokens of an n-gram"),
    ] = 5
    candidates: Annotated[
        int,
        Field(ge=1, le=64),
        Setting(
            "lookahead_candidates",
            "most n-grams to draft in one round, and to keep for each first token",
        ),
    ] = 7

    @model_validator(mode="after")
    def _fits(self) -> LookaheadRecipe:
        rows = (self.window + self.candidates) * (self.ngram - 1)
        if rows > MOST_NODES:
            raise ValueError(
                f"(window + candidates) * (ngram - 1) may be {MOST_NODES}, and is {rows}"
            )
        return self

    @property
    def largest_tree(self) -> int:
        """Of all candidates, without a common beginning."""
        return self.candidates * (self.ngram - 1)

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> Drafter:
        """See `Recipe`."""
        return LookaheadDrafter(self.window, self.ngram, self.candidates)
