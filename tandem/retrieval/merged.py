"""Continuations of a text, merged to a tree of the most frequent ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from tandem.retrieval.store import Continuations


@dataclass(eq=False)
class MergedTree:
    """A tree of a number of nodes at most; place 0 is its root, place i + 1 is after node i.

    Attributes:
        most: nodes that it may have.
        vocab_size: a continuation ends before an id that is not below.
        token_ids: of the nodes, parents before children.
        parents: the place that each hangs at.
    """

    most: int
    vocab_size: int
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    _places: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        """Whether it has all the nodes that it may have."""
        return len(self.token_ids) >= self.most

    def fill(self, matches: Iterable[Continuations]) -> None:
        """Take in the beginnings of continuations, match by match until it is full: of one match
        those that occur most often."""
        for rows in matches:
            if self.full:
                return
            self._add(rows)

    def _add(self, rows: Continuations) -> None:
        held = rows.tolist()
        # Beginnings that are not taken in yet, the most frequent first, of equal ones the first
        # row's: how often, the first row, the depth, the parent's place, the token, the rows.
        waiting: list[tuple[int, int, int, int, int, list[int]]] = []

        def wait(depth: int, place: int, own: Iterable[int]) -> None:
            """The beginnings of rows that are a token longer."""
            groups: dict[int, list[int]] = {}
            for row in own:
                if 0 <= held[row][depth] < self.vocab_size:
                    groups.setdefault(held[row][depth], []).append(row)
            for token_id, group in groups.items():
                heappush(waiting, (-len(group), group[0], depth, place, token_id, group))

        wait(0, 0, range(len(held)))
        while waiting:
            _, _, depth, parent, token_id, group = heappop(waiting)
            place = self._places.get((parent, token_id))
            if place is None:
                if self.full:
                    return
                self.token_ids.append(token_id)
                self.parents.append(parent)
                place = self._places[parent, token_id] = len(self.token_ids)
            if depth + 1 < rows.shape[1]:
                wait(depth + 1, place, group)
