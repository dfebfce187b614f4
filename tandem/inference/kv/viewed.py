"""The cache of a view: the rows that a part of a model computes after another cache's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tandem.inference.kv.blocks import Block
from tandem.inference.kv.branches import NO_BRANCHES
from tandem.inference.kv.extents import SequenceCache

if TYPE_CHECKING:  # methods without a model run where torch is not installed
    from torch import Tensor

_NOWHERE: Any = None


def _of(name: str) -> Any:
    """An attribute that is the viewed cache's own."""
    return property(
        lambda view: getattr(view.of, name), lambda view, value: setattr(view.of, name, value)
    )


class Shows(SequenceCache):
    """A cache of rows after a text that another cache holds: it computes nothing of the text.

    Attributes:
        of: the other cache.
    """

    __slots__ = ("of",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.of = SequenceCache(_NOWHERE, 0, 0)
        super().__init__(*args, **kwargs)

    def show(self, cache: SequenceCache) -> None:
        """Show this cache from now on."""
        self.of = cache


class ViewedCache(Shows):
    """Shows a sequence's cache to a part of the model that fills it.

    Rows that are fed to the part stand where the other cache goes on: they are scratch, which its
    next feed writes over. What is its own is how far these rows go.

    Attributes:
        exit_states: hidden states [n, width] at the part's exit of the rows after the text, in
            parts, in the order of their slots; empty where the part has no exit.
        nodes: branch row of each node of the last draft that was computed; None where the draft is
            a chain.
    """

    __slots__ = ("_behind", "exit_states", "nodes")

    exit_states: list[Tensor]
    nodes: Mapping[int, int] | None
    pool: Any = _of("pool")
    start: int = _of("start")
    capacity: int = _of("capacity")
    table: list[int] | None = _of("table")
    promised: int = _of("promised")
    blocks: list[Block] = _of("blocks")

    def __init__(self) -> None:
        super().__init__(_NOWHERE, 0, 0)
        self._begin()

    def show(self, cache: SequenceCache) -> None:
        """See `Shows`."""
        super().show(cache)
        self._begin()

    def _begin(self) -> None:
        """Stand at the text's end, with no rows."""
        self.length, self.branches, self.branch_tokens = self.of.length, NO_BRANCHES, ()
        self.exit_states, self.nodes = [], None
        self._behind = self.of.length

    @property
    def can_be_resumed(self) -> bool:
        """Whether the exit's states are of the rows after the text as it is now."""
        return bool(self.exit_states) and self._behind == self.of.length

    def adopt(self, token_ids: Sequence[int], salt: str | None) -> int:
        """All of a text, which the other cache holds."""
        self._begin()
        return len(token_ids)

    def keep_text(self, agreed: int, text: int) -> int:
        """See `SequenceCache.keep_text`. What the other cache holds stays, by whichever part it was
        drafted."""
        if text - 1 <= self.of.length:
            self._begin()
        else:
            self.rollback(min(agreed, text - 1))
        return self.length

    def rollback(self, length: int) -> None:
        """Forget rows, down to a length that the other cache's text reaches at least."""
        super().rollback(max(length, self.of.length))
        self._cut(self.length - self.of.length)

    def keep(self, path: Sequence[int], behind: Sequence[int] = ()) -> None:
        """Go on where the other cache does, which has kept what was accepted."""
        self._begin()

    def without_branches(self) -> ViewedCache:
        """See `SequenceCache.without_branches`."""
        own = ViewedCache()
        own.show(self.of)
        own.length = self.length
        return own

    def note(self, nodes: Mapping[int, int]) -> None:
        """See `SequenceCache.note`."""
        self.nodes = nodes

    def _cut(self, rows: int) -> None:
        """Leave the exit's states of this many rows."""
        left = []
        for part in self.exit_states:
            if rows <= 0:
                break
            left.append(part[:rows])
            rows -= len(part)
        self.exit_states = left
