"""A tree that a round draws level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.drafting.drafter import DraftSequence
from tandem.engine.asks import ReadTokens, Steps
from tandem.inference.feed import DrawnToken
from tandem.shaping.text import ShapedRows
from tandem.speculation.tree import Tree


@dataclass(eq=False)
class Growth:
    """What a round has drawn so far; the tokens are on the device.

    Attributes:
        most: that it may draw.
        drawn: in order. Place 0 is the root, place i + 1 is after draw i.
        places: that they hang at.
        token_ids: of the first draws, as far as they were read.
    """

    most: int
    drawn: list[DrawnToken] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def first(self) -> list[DrawnToken]:
        """The draws at the root."""
        return [one for one, place in zip(self.drawn, self.places, strict=True) if not place]

    def add(
        self, drawn: Sequence[DrawnToken], behind: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Take in what was drawn at places, by the number at each."""
        self.drawn += drawn
        self.places += [
            place for place, count in zip(behind, counts, strict=True) for _ in range(count)
        ]

    def shaped(self, sequence: DraftSequence, behind: Sequence[int]) -> Steps[ShapedRows | None]:
        """What the request does to the rows of places; the tokens on the way to them are read."""
        if sequence.shaped is None:
            return None
        if unread := self.drawn[len(self.token_ids) :]:
            self.token_ids += yield ReadTokens(unread)
        tree = Tree(self.places)
        paths = [[self.token_ids[at - 1] for at in tree.path_to(place)] for place in behind]
        return sequence.shaped_rows(paths)
