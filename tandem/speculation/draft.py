"""One round's drafted tokens, with the exact distributions that they were drawn from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tandem.speculation.probes import NO_PROBES, Probes
from tandem.speculation.tree import DraftShape, Tree

_NO_IDS = np.empty(0, np.uint32)
_NO_WEIGHTS = np.empty(0, np.uint16)


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens, the nodes of a tree; the rows are concatenated, as on the wire.

    A *place* is where one token goes: place 0 after the last emitted token, place i + 1 after
    node i.

    Attributes:
        token_ids: of the N nodes, in the order in which they were drawn.
        sizes: entries of each row; 0 for a certain row, which puts everything on its node's token.
        ids: [sum of sizes] uint32.
        weights: [sum of sizes] uint16.
        parents: the place that each of the N nodes hangs at; None for a chain (node i at place i).
        row_of: each node's row; None if node i has row i.
        distinct: whether siblings are drawn without replacement: a node's distribution is then its
            row without the tokens of its earlier siblings.
        probes: computed with it, and no part of it: they are not among its N nodes.
    """

    token_ids: list[int]
    sizes: list[int]
    ids: npt.NDArray[np.uint32]
    weights: npt.NDArray[np.uint16]
    parents: list[int] | None = None
    row_of: list[int] | None = None
    distinct: bool = False
    probes: Probes = NO_PROBES

    @classmethod
    def certain(cls, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> Draft:
        """A draft of tokens that were not drawn; without tokens for plain decoding.

        Args:
            token_ids: siblings are different.
            parents: the place that each hangs at; None for a chain.
        """
        if parents is not None and list(parents) == list(range(len(token_ids))):
            parents = None
        branches = None if parents is None else list(parents)
        return cls(list(token_ids), [0] * len(token_ids), _NO_IDS, _NO_WEIGHTS, branches)

    @classmethod
    def batch(
        cls,
        token_ids: npt.NDArray[np.int64],
        ids: npt.NDArray[np.int64],
        weights: npt.NDArray[np.int64],
        lengths: Sequence[int],
    ) -> list[Draft | None]:
        """Drafts from padded rows. A row with a single token is certain.

        A draft ends before a row without any weight, whose logits were not finite.

        Args:
            token_ids: [R], drawn from the rows, draft by draft.
            ids: [R, K] token ids of the rows.
            weights: [R, K], 0 for padding.
            lengths: rows of each draft.

        Returns:
            The drafts; None for a draft whose first row has no weight.
        """
        sent = weights > 0
        sent_ids, sent_weights = ids[sent].astype(np.uint32), weights[sent].astype(np.uint16)
        return cls.of_rows(token_ids, sent.sum(-1), sent_ids, sent_weights, lengths)

    @classmethod
    def of_rows(
        cls,
        token_ids: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int64],
        ids: npt.NDArray[np.uint32],
        weights: npt.NDArray[np.uint16],
        lengths: Sequence[int],
    ) -> list[Draft | None]:
        """The same from rows of given sizes, without padding."""
        broken = np.flatnonzero(sizes == 0).tolist()
        certain = sizes == 1
        if certain.any():
            kept = np.repeat(~certain, sizes)
            ids, weights, sizes = ids[kept], weights[kept], np.where(certain, 0, sizes)
        ends = [0, *sizes.cumsum().tolist()]
        tokens, counts = token_ids.tolist(), sizes.tolist()
        drafts: list[Draft | None] = []
        first = 0
        for length in lengths:
            rows = slice(first, first + length)
            first += length
            # Tokens drawn before a broken row must not be withdrawn.
            end = next((row for row in broken if rows.start <= row < rows.stop), rows.stop)
            rows = slice(rows.start, end)
            if length and rows.start == rows.stop:
                drafts.append(None)
                continue
            entries = slice(ends[rows.start], ends[rows.stop])
            drafts.append(cls(tokens[rows], counts[rows], ids[entries], weights[entries]))
        return drafts

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def tree(self) -> Tree:
        """Where its nodes hang."""
        return Tree.of(self.parents, len(self.token_ids))

    def places(self) -> Sequence[int]:
        """The place that each node hangs at."""
        return range(len(self.token_ids)) if self.parents is None else self.parents

    def rows_of_nodes(self) -> Sequence[int]:
        """Each node's row."""
        return range(len(self.token_ids)) if self.row_of is None else self.row_of

    def homes(self) -> Sequence[int]:
        """The place that each node leads to, see `Tree.homes`."""
        return self.tree.homes(self.token_ids)

    def computed(self) -> Sequence[int]:
        """The places whose nodes a target computes: all but those of twins."""
        homes = self.homes()
        return homes if self.parents is None else sorted(set(homes))

    def row_of_places(self) -> Sequence[int]:
        """For each place, its row in a pass over the last token and the nodes except twins."""
        if self.parents is None:
            return range(len(self.token_ids) + 1)
        rows: dict[int, int] = {0: 0}
        for home in self.homes():
            rows.setdefault(home, len(rows))
        return [0, *(rows[home] for home in self.homes())]

    def path_to(self, place: int) -> Sequence[int]:
        """The places on the way from the root to a place, without the root."""
        return range(1, place + 1) if self.parents is None else self.tree.path_to(place)

    def emitted(self, place: int, next_token: int) -> list[int]:
        """What is emitted where the last kept node is at a place: the way to it, then a token."""
        if self.parents is None:
            return [*self.token_ids[:place], next_token]
        return [*(self.token_ids[at - 1] for at in self.path_to(place)), next_token]

    def certain_tokens(self) -> list[int]:
        """The token of each certain row, in order."""
        named = dict(zip(self.rows_of_nodes(), self.token_ids, strict=True))
        return [named[row] for row, size in enumerate(self.sizes) if not size]

    def left_by_siblings(self) -> list[float]:
        """For each node, the exact share of its row without the tokens of earlier siblings."""
        ends = np.cumsum(self.sizes).tolist()
        found: list[float] = []
        taken: dict[int, list[int]] = {}
        for place, row, token_id in zip(
            self.places(), self.rows_of_nodes(), self.token_ids, strict=True
        ):
            siblings = taken.setdefault(place, [])
            share = 1.0
            if siblings and self.sizes[row]:
                entries = slice(ends[row] - self.sizes[row], ends[row])
                weights = self.weights[entries].astype(np.int64)
                total = int(weights.sum())
                gone = int(weights[np.isin(self.ids[entries], siblings)].sum())
                share = (total - gone) / total
            elif token_id in siblings:
                share = 0.0
            found.append(share)
            siblings.append(token_id)
        return found

    def first(self, count: int) -> Draft:
        """A chain's first tokens."""
        if count >= len(self):
            return self
        if self.row_of is not None:
            return replace(self, token_ids=self.token_ids[:count], row_of=self.row_of[:count])
        sizes = self.sizes[:count]
        end = sum(sizes)
        return Draft(self.token_ids[:count], sizes, self.ids[:end], self.weights[:end])

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before it and has its own row."""
        return self.parents is None and self.row_of is None

    @property
    def depth(self) -> int:
        """Number of nodes of the longest path."""
        return self.tree.depth

    def check_shape(self, vocab_size: int) -> None:
        """Check everything except the rows' contents, which `faults` checks for a batch.

        Raises:
            ValueError: something is wrong; the message begins with the field's name.
        """
        count, rows, entries = len(self.token_ids), len(self.sizes), sum(self.sizes)
        if self.row_of is None and rows != count:
            raise ValueError(f"draft.rows.sizes holds {rows} rows for {count} tokens")
        if len(self.ids) != entries:
            raise ValueError(f"draft.rows.ids holds {len(self.ids)} ids, sizes say {entries}")
        if len(self.weights) != entries:
            raise ValueError(
                f"draft.rows.weights holds {len(self.weights)} weights, sizes say {entries}"
            )
        largest = max(self.token_ids, default=0)
        if largest >= vocab_size:
            raise ValueError(
                f"draft.token_ids holds id {largest}, the target's vocabulary has {vocab_size}"
            )
        if fault := self.fault_of_nodes():
            raise ValueError(fault)

    def fault_of_rows(self, vocab_size: int) -> str:
        """What is wrong in the rows, beginning with the field's name; empty if nothing."""
        if not len(self.ids):
            return ""
        if (largest := int(self.ids.max())) >= vocab_size:
            return f"draft.rows.ids holds id {largest}, the target's vocabulary has {vocab_size}"
        if not self.weights.all():
            return "draft.rows.weights holds a weight of 0; leave such tokens out"
        rows = np.split(self.ids, np.cumsum(self.sizes)[:-1])
        for row, ids in enumerate(rows):
            if len(np.unique(ids)) < len(ids):
                return f"draft.rows.ids holds a token id twice in row {row}"
        for node, (token_id, row) in enumerate(
            zip(self.token_ids, self.rows_of_nodes(), strict=True)
        ):
            if len(rows[row]) and token_id not in rows[row]:
                return f"draft.token_ids[{node}] = {token_id} is outside its row"
        return ""

    def fault_of_nodes(self) -> str:
        """What is wrong with the tree's structure, beginning with the field's name; else empty.

        Chains with one row per node are always sound.
        """
        if self.is_chain:
            return ""
        named: dict[int, int] = {}
        first: dict[tuple[int, int], int] = {}
        twins: set[int] = set()
        nodes = zip(self.token_ids, self.places(), self.rows_of_nodes(), strict=True)
        for node, (token_id, place, row) in enumerate(nodes):
            if place in twins:
                return (
                    f"draft.parents[{node}] = {place} is after a repeated sibling, whose children"
                    " belong to the first one"
                )
            if named.setdefault(row, token_id) != token_id and not self.sizes[row]:
                return f"draft.row_of[{node}] = {row} is a certain row of another token"
            if first.setdefault((place, token_id), node) != node:
                if self.distinct:
                    return (
                        f"draft.token_ids[{node}] = {token_id} repeats one of its distinct siblings"
                    )
                twins.add(node + 1)
        return ""

    def misfit(self, takes: DraftShape) -> str:
        """Why a rule cannot decide this draft, beginning with the field's name; empty if it can.

        The draft's shape must be sound.

        Args:
            takes: the widest kind of draft that the rule can decide.
        """
        if self.is_chain or takes is DraftShape.TREE:
            return ""
        if takes is DraftShape.CHAIN:
            return "draft.parents: the verifier takes chains of a row a token"
        return self._not_independent()

    def _not_independent(self) -> str:
        """Why this is not a merge of several independent chains; empty if it is."""
        if self.distinct:
            return "draft.distinct_siblings: the verifier takes independent chains"
        rows: dict[int, int] = {}
        home: dict[tuple[int, int], int] = {}
        chains: Counter[int] = Counter()
        draws: Counter[int] = Counter()
        nodes = zip(self.token_ids, self.places(), self.rows_of_nodes(), strict=True)
        for node, (token_id, place, row) in enumerate(nodes):
            if rows.setdefault(place, row) != row:
                return f"draft.row_of[{node}] = {row}: draws at one place must share their row"
            chains[home.setdefault((place, token_id), node + 1)] += 1
            draws[place] += 1
        for place, count in draws.items():
            if place and count != chains[place]:
                return (
                    f"draft.parents: {count} draws at place {place}, which {chains[place]} chains"
                    " reach"
                )
        return ""


NO_DRAFT = Draft.certain(())  # of plain decoding
