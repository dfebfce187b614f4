"""Continuations of a text, merged to a tree of the most frequent ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.retrieval.store import Continuations


@dataclass(eq=False)
class MergedTree:
    """A tree of at most so many nodes; place 0 is its root, place i + 1 is behind node i.

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
        counts: dict[tuple[int, int], int] = {}  # of nodes, by the number of their parent and token
        numbers: dict[tuple[int, int], int] = {}
        for row in rows.tolist():
            at = 0
            for token_id in row:
                if not 0 <= token_id < self.vocab_size:
                    break
                node = at, token_id
                at = numbers.setdefault(node, len(numbers) + 1)
                counts[node] = counts.get(node, 0) + 1
        # Nodes were numbered behind their parents, which occur at least as often.
        places = {0: 0}
        for node in sorted(counts, key=counts.__getitem__, reverse=True):
            at, token_id = places[node[0]], node[1]
            place = self._places.get((at, token_id))
            if place is None:
                if self.full:
                    return
                self.token_ids.append(token_id)
                self.parents.append(at)
                place = self._places[at, token_id] = len(self.token_ids)
            places[numbers[node]] = place
