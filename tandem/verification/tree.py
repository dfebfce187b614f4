"""What rules on trees are made of.

A step of a judgement takes all siblings of one rank at once, over all places of one depth and all
drafts of a batch. Nothing here synchronises with the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.speculation.proposal import NodeLayout, Proposal
from tandem.speculation.tree_batch import Siblings, TreeBatch


class Judgement(Protocol):
    """A rule's judgement of a batch of rounds."""

    def accept(self) -> Tensor:
        """See `Verifier.accept_probabilities`."""

    def residual(self, place: Tensor) -> Tensor:
        """See `Verifier.residual_weights`."""

    def carry(self, place: Tensor, next_token: Tensor) -> list[Any]:
        """See `Verifier.next_carry`."""


class TreeRule(ABC):
    """A rule's form for trees."""

    @abstractmethod
    def judge(self, proposal: Proposal, target_probs: Tensor) -> Judgement:
        """Prepare a batch of trees; target_probs [B, N+1, V] has a row for each place."""

    @abstractmethod
    def stop(self, tree: TreeBatch, passed: Tensor) -> Tensor:
        """[B]: the place of the last node to keep, given which nodes [B, N] passed."""


@dataclass(frozen=True)
class TreeNodes:
    """A batch of trees, in the form that rules work on.

    Attributes:
        tokens: [B, N] int64.
        branches: the structure of the trees, and the row of each node.
        p: [B, N+1, V], the target's row of each place.
        rows: [B, R, V], the drafter's rows.
    """

    tokens: Tensor
    branches: NodeLayout
    p: Tensor
    rows: Tensor

    @classmethod
    def of(cls, proposal: Proposal, target_probs: Tensor) -> TreeNodes:
        """From a batch that has branches."""
        assert proposal.branches is not None
        rows = proposal.dense(target_probs.shape[-1], target_probs.dtype)
        return cls(proposal.tokens, proposal.branches, target_probs, rows)

    @property
    def tree(self) -> TreeBatch:
        """The structure of the trees."""
        return self.branches.tree

    def token(self, siblings: Siblings) -> Tensor:
        """[n, 1] tokens of these nodes."""
        return self.tokens[siblings.batch, siblings.node][:, None]

    def q(self, siblings: Siblings) -> Tensor:
        """[n, V]: the distribution that each node was drawn from."""
        batch, node = siblings.batch, siblings.node
        row = self.rows[batch, self.branches.row_of[batch, node]]
        if not siblings.earlier.shape[1]:
            return row
        return _without(
            row,
            self.tokens[batch[:, None], siblings.earlier],
            self.branches.left[batch, node],
            self.branches.distinct[batch],
        )

    def child(self, place: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """The child [B] of a rank at each place [B], 0 if there is none; and whether there is."""
        each = torch.arange(len(place), device=place.device)
        node = self.tree.children[each, place, rank]
        return node.clamp(min=0), node >= 0

    def q_of_child(self, place: Tensor, rank: int) -> Tensor:
        """[B, V]: the distribution of the child of a rank; arbitrary if there is no such child."""
        each = torch.arange(len(place), device=place.device)
        node, _ = self.child(place, rank)
        row = self.rows[each, self.branches.row_of[each, node]]
        if not rank:
            return row
        earlier = self.tree.children[each, place, :rank].clamp(min=0)
        taken = self.tokens[each[:, None], earlier]
        return _without(row, taken, self.branches.left[each, node], self.branches.distinct)

    def p_at(self, place: Tensor) -> Tensor:
        """[B, V]: the target's row of a place of each draft."""
        return self.p[torch.arange(len(place), device=place.device), place]


def _without(row: Tensor, taken: Tensor, left: Tensor, distinct: Tensor) -> Tensor:
    """Rows [n, V], without the tokens `taken` [n, k] if `distinct` [n], and divided by `left` [n].

    `left` comes from the integer weights: 1 - q in float32 may round to 0.
    """
    rest = row.scatter(1, taken, 0.0) / left.to(row.dtype).clamp(min=1e-30)[:, None]
    return torch.where(distinct[:, None], rest, row)


def first_passed_child(tree: TreeBatch, passed: Tensor) -> Tensor:
    """[B]: the end of the path that goes, from the root on, to the first child that passed."""
    batch = len(passed)
    each = torch.arange(batch, device=passed.device)
    place = torch.zeros(batch, dtype=torch.int64, device=passed.device)
    for _ in tree.levels:
        nodes = tree.children[each, place]
        good = (nodes >= 0) & passed.gather(1, nodes.clamp(min=0))
        first = nodes.gather(1, good.long().argmax(1, keepdim=True)).clamp(min=0)
        place = torch.where(good.any(1), tree.home.gather(1, first)[:, 0], place)
    return place


def first_in_post_order(tree: TreeBatch, passed: Tensor) -> Tensor:
    """[B]: the place of the first node that passed, children before parents; 0 if none did."""
    never = tree.order.shape[1]
    # A last column that never passes, for a batch without any node.
    when, node = pad(torch.where(passed, tree.order, never), (0, 1), value=never).min(1)
    home = pad(tree.home, (0, 1)).gather(1, node[:, None])[:, 0]
    return torch.where(when < never, home, 0)


def excess_or(weights: Tensor, fallback: Tensor) -> tuple[Tensor, Tensor]:
    """The positive part of weights [n, V], normalised, and its mass [n].

    If nothing is left, which has probability 0, `fallback` [n, V] is returned instead.
    """
    weights = weights.clamp_(min=0)
    mass = weights.sum(-1)
    law = torch.where(mass[:, None] > 0, weights / mass.clamp(min=1e-30)[:, None], fallback)
    return law, mass
