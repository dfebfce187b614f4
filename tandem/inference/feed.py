"""The input of a scorer: new tokens of one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:  # methods without a model run where torch is not installed
    import numpy.typing as npt
    from torch import Tensor

    from tandem.inference.kv.pool import SequenceCache
    from tandem.speculation.categorical import Categorical


@dataclass(slots=True, eq=False)
class Draws:
    """The tokens that one step drew for several sequences, on the device.

    Attributes:
        tokens: [R * siblings] int64, row by row.
        rows: the R distributions they were drawn from.
        siblings: the most draws of one row; rows with fewer are padded.
        certain: whether they were not drawn, but are the likeliest tokens of their rows.
        same: for each row the first one that is the same one of the pass; None where each has its
            own.
        confidence: [R * siblings] the model's own probability of greedy tokens, NaN for others;
            None where it is not wanted.
        packed: [R, siblings + 2 K], of which tokens, ids and weights are parts, where kernels drew;
            else None.
    """

    tokens: Tensor
    rows: Categorical
    siblings: int = 1
    certain: bool = False
    same: Sequence[int] | None = None
    confidence: Tensor | None = None
    packed: Tensor | None = None

    def shared(self, row: int) -> int:
        """The row as which a row is sent."""
        return row if self.same is None else self.same[row]


@dataclass(slots=True, eq=False)
class DrawnToken:
    """One sequence's draw: the one at `index` among a step's."""

    draws: Draws
    index: int

    def __len__(self) -> int:
        """One token."""
        return 1


@dataclass(frozen=True, slots=True)
class Resumed:
    """Rows whose lower layers are computed already, by an exit of the same model over the same
    slots: their keys and values are there, and only the upper layers are left.

    Attributes:
        exit: number of the layers that are computed.
        states: hidden states [n, width] after these, of a feed's first tokens, in parts.
    """

    exit: int
    states: Sequence[Tensor]

    @property
    def count(self) -> int:
        """Rows."""
        return sum(len(part) for part in self.states)

    def first(self, most: int) -> Resumed | None:
        """The first rows, at most `most`; None where there are none."""
        kept: list[Tensor] = []
        for part in self.states:
            if most <= 0:
                break
            kept.append(part[:most])
            most -= len(part)
        return Resumed(self.exit, kept) if kept else None


class Choice(Protocol):
    """Looks at the keys of a text in a pass over the tokens after it."""

    def see(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Called by each attention.

        Args:
            layer: of the pool.
            query: [Hq, D] of the first of these tokens.
            keys: [H, n, D] of the text, and of the tokens.
            values: [H, n, Dv] likewise.
        """


@dataclass(slots=True, eq=False)
class TokenInFlight:
    """A token that goes through a model's layers by groups.

    Attributes:
        token_id: of it.
        through: groups that it has gone through. After all of them, its row is the model's.
        states: [width] after these; None before the first.
    """

    token_id: int
    through: int = 0
    states: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Feed:
    """New tokens of one sequence.

    Without parents the tokens extend the trunk. With n parents the last n tokens are branch rows;
    any tokens before those extend the trunk first, and branch rows of earlier feeds are then
    forgotten. A row sees the trunk, its ancestors among the branch rows, and itself.

    Attributes:
        cache: grows by the tokens.
        token_ids: at least one; drawn ones are on the device only.
        rows: number of last tokens whose logits are wanted; may be 0. For a head with several rows
            after its newest token, how many of these.
        states: number of last tokens whose hidden states are wanted, of the layers that the scorer
            was loaded for.
        features: for a head, hidden states of its target [*, layers, width], bfloat16 as int16, in
            parts that follow each other: of the positions before the tokens. None where there are
            none.
        parents: of branch rows: 0 for the trunk's end, j for branch row j, counted from 1 in the
            order in which they were fed since the trunk last grew, in this feed or before.
        resumed: what is computed of the first tokens, not of all; None for nothing.
        choice: looks at the text's keys; None where nothing does.
        flight: the tokens, where each goes through one group of layers alone; rows are those of the
            first ones. None where they go through all layers.
    """

    cache: SequenceCache
    token_ids: Sequence[int | DrawnToken] | DrawnToken
    rows: int
    parents: Sequence[int] | None = None
    states: int = 0
    features: Sequence[npt.NDArray[Any] | Tensor] | None = None
    resumed: Resumed | None = None
    choice: Choice | None = None
    flight: Sequence[TokenInFlight] | None = None


def listed(token_ids: Sequence[int | DrawnToken] | DrawnToken) -> Sequence[int | DrawnToken]:
    """The tokens of a feed, one by one."""
    return (token_ids,) if isinstance(token_ids, DrawnToken) else token_ids


def again(feed: Feed) -> Feed:
    """The feed together with the branch rows fed before, if it only adds branch rows to them.

    A feed is returned unchanged if all branch rows form one chain, which is a text like a trunk.
    """
    cache, parents = feed.cache, feed.parents
    if not parents or not cache.branches or len(parents) < len(feed.token_ids):
        return feed
    if cache.branches.grown(parents).in_line:
        return feed
    tokens = [*cache.branch_tokens, *listed(feed.token_ids)]
    parents = (*cache.branches.parents, *parents)
    before = cache.without_branches()
    return Feed(before, cast("Sequence[int]", tokens), feed.rows, parents, feed.states)
