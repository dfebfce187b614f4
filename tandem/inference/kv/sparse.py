"""Few keys of a long text: its first ones, chunks that a query points at, and the latest ones.

TriForce's retrieval cache (Sun et al., arXiv 2404.11912) and StreamingLLM's window (Xiao et al.,
arXiv 2309.17453). The keys keep the positions that they were rotated for, and new tokens go on at
their own. Unlike in the papers, new tokens do not take the places of chosen ones: the latest keys
grow after these until all are chosen again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.inference.kv.extents import SequenceCache
from tandem.inference.kv.pool import KVPool
from tandem.inference.kv.sparse_keys import SparseKeys
from tandem.inference.kv.viewed import Shows

# Tokens after which keys are chosen again.
STRIDE = 64
# Rounds of which the share of kept tokens is compared with the best since keys were chosen, how
# much of it is left, at least, the weight of a round, and the drafted tokens that it has.
_ROUNDS, _LEFT, _WEIGHT, _LEAST = 4, 0.7, 0.3, 2


class SparseCache(Shows):
    """Chosen keys and values of a text that another cache holds, and of the rows after it.

    They are copied once, when they are chosen. `length` counts slots; the last of these are the
    text's latest positions and the rows after them, in order.

    Attributes:
        keys: which are seen.
        due: whether they are to be chosen again, before the next row.
    """

    __slots__ = ("_best", "_chosen", "_kept", "_rounds", "_told", "due", "keys")

    def __init__(self, part: SequenceCache, keys: SparseKeys) -> None:
        super().__init__(part.pool, part.start, part.capacity, promised=part.promised)
        self.keys = keys
        self._begin()

    def show(self, cache: SequenceCache) -> None:
        """See `Shows`."""
        super().show(cache)
        self._begin()

    def _begin(self) -> None:
        """With no keys."""
        self.due, self.length, self.skipped = True, 0, 0
        self._told = self.of.length
        self._best = self._kept = 0.0
        self._rounds = self._chosen = 0

    def adopt(self, token_ids: Sequence[int], salt: str | None) -> int:
        """See `Shows`."""
        self._begin()
        return len(token_ids)

    @property
    def reach(self) -> int:
        """Positions of the text, and of the rows after it; nothing while keys are due."""
        return self.length + self.skipped

    def rollback(self, length: int) -> None:
        """Forget rows, down to a length of the text and of them."""
        if not self.due:
            super().rollback(max(length, self.of.length) - self.skipped)

    def keep_text(self, agreed: int, text: int) -> int:
        """See `SequenceCache.keep_text`. Keys of what was kept take the place of the rows' own."""
        held = self.of.length
        if text - 1 > held:  # what is assumed is not the other cache's yet
            self.rollback(min(agreed, text - 1))
            return min(agreed, text - 1)
        if not self.due:
            self._judge(agreed - self._told - 1, self.reach - self._told - 1)
            self.due = self.due or held - self.skipped > self._chosen + STRIDE
        if not self.due:
            fresh = held - self._told
            if fresh > 0:
                copied(self.of, self._told, self, self._told - self.skipped, fresh)
            self.length = held - self.skipped
        self._told = held
        return held

    def _judge(self, kept: int, drafted: int) -> None:
        """Have keys be chosen again where much less is kept than at their best.

        Args:
            kept: drafted tokens that came out, of those whose rows are held.
            drafted: of these rows; of few nothing is learnt.
        """
        if drafted < _LEAST:
            return
        share = min(max(kept, 0) / drafted, 1.0)
        self._kept = share if not self._rounds else self._kept + _WEIGHT * (share - self._kept)
        self._rounds += 1
        self._best = max(self._best, self._kept)
        self.due = self._rounds > _ROUNDS and self._kept < _LEFT * self._best

    def chosen(self, choice: KeyChoice) -> None:
        """Keys were chosen, and are there in all layers."""
        self.due = False
        self.length, self.skipped = choice.seen, self.of.length + choice.rows - choice.seen
        self._told, self._chosen = self.of.length, self.of.length - self.skipped
        self._rounds, self._best, self._kept = 0, 0.0, 0.0


class KeyChoice:
    """Chooses keys of a text in a pass over the tokens after it, layer by layer.

    Args:
        cache: gets them.
        rows: of the pass.
    """

    def __init__(self, cache: SparseCache, rows: int) -> None:
        keys, text = cache.keys, cache.of.length
        self._cache, self.rows = cache, rows
        # Where all fit, all are seen.
        self._whole = text <= keys.budget
        self._chunk, self._first = keys.chunk, min(keys.sink, text)
        among = (text - keys.sink - keys.latest) // keys.chunk
        self._among = 0 if self._whole or keys.kind == "window" else among
        self._count = min(keys.chunks, self._among)
        # All from here on are seen; without chunks they are as many as the first ones leave.
        self._latest = keys.sink + self._among * keys.chunk
        if not self._among:
            self._latest = 0 if self._whole else text - (keys.budget - keys.sink)
        self._end = text + rows

    @property
    def seen(self) -> int:
        """Slots that they take, with the rows after them."""
        if self._whole:
            return self._end
        return self._first + self._count * self._chunk + self._end - self._latest

    def see(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Choose in a layer.

        Args:
            layer: of the pool.
            query: [Hq, D] of the first token after the text.
            keys: [H, n, D] of the text and the rows after it, rotated.
            values: [H, n, Dv] likewise.
        """
        pool: KVPool = self._cache.pool  # type: ignore[assignment]
        start = self._cache.start
        for source, held in ((keys, pool.keys[layer]), (values, pool.values[layer])):
            target = held.narrow(1, start, self.seen)
            if self._whole:
                target.copy_(source)
                continue
            at = self._first
            target[:, :at] = source[:, :at]
            if self._count:
                if source is keys:
                    self._places = self._chosen(query, keys)
                places = self._places[..., None].expand(-1, -1, source.shape[2])
                behind = at + places.shape[1]
                target[:, at:behind] = source.gather(1, places)
                at = behind
            target[:, at:] = source[:, self._latest : self._end]

    def _chosen(self, query: Tensor, keys: Tensor) -> Tensor:
        """[H, places] of the keys of the chunks that the query points at most, in the text's order:
        by the sum over the query heads of a key head."""
        heads, _, head_dim = keys.shape
        among = keys.narrow(1, self._first, self._among * self._chunk)
        means = among.view(heads, self._among, self._chunk, head_dim).mean(2)
        scores = (means @ query.view(heads, -1, head_dim).mT).sum(-1)
        best = scores.topk(self._count, dim=1).indices.sort(1).values
        within = torch.arange(self._chunk, device=keys.device)
        return (self._first + best[..., None] * self._chunk + within).flatten(1)


def copied(source: SequenceCache, first: int, to: SequenceCache, at: int, count: int) -> None:
    """Copy keys and values from one cache to another, in all layers.

    Args:
        source: has them in one piece.
        first: position there.
        to: its pool has the same layers.
        at: first slot of its part.
        count: positions.
    """
    one: KVPool = source.pool  # type: ignore[assignment]
    other: KVPool = to.pool  # type: ignore[assignment]
    with torch.inference_mode():
        for theirs, own in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
            own.narrow(1, to.start + at, count).copy_(theirs.narrow(1, source.start + first, count))
