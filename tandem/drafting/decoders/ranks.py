"""How likely siblings are kept by their rank, as a text has shown it so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from tandem.speculation.draft import Draft

# What was expected beforehand weighs as much as this number of the text's own places.
_BEFOREHAND = 32
# Steps that tell shapes apart: finer ones would ask for new shapes that are worth the same.
_STEP = 0.02


@dataclass(eq=False)
class Ranks:
    """Of one text, so that a seed repeats its shapes, whatever other texts do.

    Attributes:
        beforehand: acceptance by sibling rank, falling, as it was measured.
        drawn: how often there was a sibling of each rank where a path came by.
        kept: how often it was the one that was kept.
    """

    beforehand: tuple[float, ...]
    drawn: list[int] = field(init=False)
    kept: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.drawn = [0] * len(self.beforehand)
        self.kept = [0] * len(self.beforehand)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By sibling rank, falling."""
        found: list[float] = []
        for expected, kept, drawn in zip(self.beforehand, self.kept, self.drawn, strict=True):
            share = (_BEFOREHAND * expected + kept) / (_BEFOREHAND + drawn)
            share = max(round(share / _STEP), 1) * _STEP if drawn else expected
            found.append(min([share, *found[-1:]]))
        return tuple(found)

    def see(self, draft: Draft, kept: Sequence[int]) -> None:
        """Note which siblings the kept tokens of a draft were."""
        tree = draft.tree
        path = tree.follow(draft.token_ids, kept)
        for at, below in zip_longest((0, *path), path):
            known = tree.children_of(at)[: len(self.drawn)]
            for rank, sibling in enumerate(known):
                self.drawn[rank] += 1
                self.kept[rank] += sibling == below
            if below not in known:
                break
