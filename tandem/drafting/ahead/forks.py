"""A sequence as an outcome would leave it, beside the sequence itself."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.drafting.drafter import DraftSequence
from tandem.inference.feed import DrawnToken, Feed, listed
from tandem.inference.kv.branches import NO_BRANCHES, Branches
from tandem.inference.kv.extents import SequenceCache
from tandem.speculation.randomness import RandomNumbers

# Tokens of a text that is copied as one.
_LONG = 32


@dataclass(eq=False)
class ForkedCache:
    """A cache of its own to a drafting method, and a branch of a real one in memory.

    Its trunk is the real one's and a path of the real one's branch rows. Numbers of rows are the
    real cache's, except in `placed`, whose feeds have the fork's own.

    Attributes:
        real: the cache that holds the rows.
        path: rows that extend the real trunk.
        rows: branch rows of the fork.
        branches: how these hang together, in the fork's own numbers.
        settled: a text, and how much of it others may find if the outcome occurs.
    """

    real: SequenceCache
    path: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    branches: Branches = NO_BRANCHES
    settled: tuple[Sequence[int], int] = ((), 0)

    @classmethod
    def of(cls, cache: SequenceCache, length: int, token_ids: Sequence[Any]) -> ForkedCache:
        """A fork of a cache whose end is in branch rows from now on; see `SequenceCache.reopen`."""
        line, others, branches = cache.length - length, len(cache.branches), cache.branches
        cache.reopen(length, token_ids)
        rows = list(range(line + 1, line + others + 1))
        return cls(cache, list(range(1, line + 1)), rows, branches)

    def twin(self) -> ForkedCache:
        """Another fork that is as far."""
        return ForkedCache(self.real, list(self.path), list(self.rows), self.branches)

    @property
    def length(self) -> int:
        """Of its trunk."""
        return self.real.length + len(self.path)

    def keep_text(self, agreed: int, text: int) -> int:
        """See `SequenceCache.keep_text`."""
        kept = min(agreed, text - 1)
        self.rollback(kept)
        return kept

    def note(self, nodes: Mapping[int, int]) -> None:
        """See `SequenceCache.note`; nothing reads them."""

    def rollback(self, length: int) -> None:
        """See `SequenceCache.rollback`; no further than the real trunk's end."""
        keep = length - self.real.length
        assert keep >= 0
        del self.path[keep:]
        self.rows, self.branches = [], NO_BRANCHES

    def keep(self, path: Sequence[int]) -> None:
        """See `SequenceCache.keep`."""
        self.branches.check_path(path)
        self.path += [self.rows[row - 1] for row in path]
        self.rows, self.branches = [], NO_BRANCHES

    def publish(self, token_ids: Sequence[int], end: int) -> None:
        """See `SequenceCache.publish`; nothing is found of a fork before its outcome occurs."""
        self.settled = token_ids, end

    def placed(self, feed: Feed, before: int) -> PlacedFeed:
        """Where a feed of the fork goes, by the number of rows before it in the real cache."""
        parents = list(feed.parents or ())
        count = len(feed.token_ids)
        line = count - len(parents)
        new = list(range(before + 1, before + count + 1))
        path = [*self.path, *new[:line]]
        end = path[-1] if path else 0
        rows = ([] if line else self.rows) + new[line:]
        branches = (NO_BRANCHES if line else self.branches).grown(parents)
        above = [self.path[-1] if self.path else 0, *new[: line - 1]] if line else []
        above += [rows[parent - 1] if parent else end for parent in parents]
        return PlacedFeed(self, listed(feed.token_ids), above, path, rows, branches)

    def adopt(self) -> None:
        """Make the real cache what the fork is."""
        self.real.keep(self.path, self.rows)
        self.real.publish(*self.settled)


@dataclass(frozen=True, slots=True)
class PlacedFeed:
    """A fork's feed in the real cache.

    Attributes:
        fork: whose it is.
        token_ids: of the feed.
        parents: real rows that they hang at.
        path: of the fork, after the feed; the next two likewise.
        rows: see `ForkedCache`.
        branches: of the fork, after the feed.
    """

    fork: ForkedCache
    token_ids: Sequence[int | DrawnToken]
    parents: Sequence[int]
    path: list[int]
    rows: list[int]
    branches: Branches

    def fed(self) -> None:
        """The real cache has taken it in."""
        fork = self.fork
        fork.path, fork.rows, fork.branches = self.path, self.rows, self.branches


class Copies:
    """Copies of an object, with stand-ins for some of what it holds.

    Args:
        original: copied as it is now.
        stands: what has a stand-in in each copy.
    """

    def __init__(self, original: Any, stands: Sequence[object]) -> None:
        self._kept: list[Any] = []
        self._stands = {id(one): i for i, one in enumerate(stands)}
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self._name  # type: ignore[method-assign]
        pickler.dump(original)
        self._bytes = buffer.getvalue()

    def _name(self, one: object) -> tuple[str, int] | None:
        """Of what is not written out: stand-ins, numbers, which are the same after every outcome,
        and texts, which are long."""
        place = self._stands.get(id(one))
        if place is not None:
            return "stands", place
        kind = "numbers" if isinstance(one, RandomNumbers) else "text" if _is_text(one) else ""
        if not kind:
            return None
        self._kept.append(one)
        return kind, len(self._kept) - 1

    def copy(self, stand_ins: Sequence[object], *, last: bool = False) -> Any:
        """A copy.

        Args:
            stand_ins: in the order of what they stand for.
            last: the original and its texts are not used any more.
        """
        unpickler = pickle.Unpickler(io.BytesIO(self._bytes))

        def load(name: tuple[str, int]) -> object:
            kind, place = name
            if kind == "stands":
                return stand_ins[place]
            kept = self._kept[place]
            return list(kept) if kind == "text" and not last else kept

        unpickler.persistent_load = load  # type: ignore[method-assign]
        return unpickler.load()


def _is_text(one: object) -> bool:
    """Whether it is a list of token ids that is worth a name."""
    return type(one) is list and len(one) >= _LONG and type(one[0]) is type(one[-1]) is int


def adopted(sequence: DraftSequence, fork: DraftSequence) -> None:
    """Have a sequence go on as its fork did, which is not used any more."""
    forks = fork.caches
    for cache in forks:
        cache.adopt()
    behind: DraftSequence = Copies(fork, forks).copy(sequence.caches, last=True)
    sequence.token_ids, sequence.state = behind.token_ids, behind.state
    sequence.threshold = behind.threshold
