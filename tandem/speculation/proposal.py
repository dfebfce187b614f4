"""The input and the output of a verifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.speculation.draft import Draft
from tandem.speculation.tree_batch import TreeBatch


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """The structure of a batch that is not all chains with one row per node.

    Attributes:
        tree: the structure of the trees.
        row_of: [B, N] int64, each node's row.
        distinct: [B] bool, whether siblings are drawn without replacement.
        left: [B, N] float64, the share of a node's row that its earlier siblings left; 1 if
            siblings are independent.
    """

    tree: TreeBatch
    row_of: Tensor
    distinct: Tensor
    left: Tensor


@dataclass(frozen=True, slots=True)
class Proposal:
    """The drafts of a batch of sequences, with the distributions they were drawn from.

    Attributes:
        tokens: [B, N] int64; entries at or beyond a draft's length are padding (0).
        lengths: [B] int64, each 0..N; 0 means no draft.
        ids: [B, R, K] int64 token ids of the rows of q; padding has probability 0.
        probs: [B, R, K] their probabilities, float32 or float64.
        rows: [B, R, V] the same rows over the whole vocabulary, if they are known.
        branches: None if all drafts are chains, in which node i hangs at place i and has row i.
    """

    tokens: Tensor
    lengths: Tensor
    ids: Tensor
    probs: Tensor
    rows: Tensor | None = None
    branches: NodeLayout | None = None

    @classmethod
    def from_dense(
        cls,
        tokens: Tensor,
        draft_probs: Tensor,
        lengths: Tensor | None = None,
        parents: Sequence[Sequence[int]] | None = None,
        row_of: Tensor | None = None,
        distinct: bool = False,
    ) -> Proposal:
        """Wrap dense rows of q as they are, without quantising.

        Args:
            tokens: [B, N] int64.
            draft_probs: [B, R, V].
            lengths: [B] int64; all N by default.
            parents: the place that each node of each draft hangs at; chains by default.
            row_of: [B, N] int64; node i has row i by default.
            distinct: whether siblings are drawn without replacement.
        """
        batch, rows, vocab_size = draft_probs.shape
        most = tokens.shape[1]
        if lengths is None:
            lengths = torch.full((batch,), most, dtype=torch.int64, device=tokens.device)
        ids = torch.arange(vocab_size, device=tokens.device).expand(batch, rows, vocab_size)
        if parents is None:
            return cls(tokens, lengths, ids, draft_probs, draft_probs)
        drafted = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        tree = TreeBatch.of(parents, drafted, tokens.device)
        if row_of is None:
            row_of = torch.arange(most, device=tokens.device).expand(batch, most)
        left = torch.ones(batch, most, dtype=torch.float64, device=tokens.device)
        if distinct:
            for level in tree.levels:
                for nodes in level[1:]:
                    row = draft_probs[nodes.batch, row_of[nodes.batch, nodes.node]].double()
                    taken = tokens[nodes.batch[:, None], nodes.earlier]
                    left[nodes.batch, nodes.node] = row.scatter(1, taken, 0.0).sum(-1)
        wanted = torch.full((batch,), distinct, device=tokens.device)
        branches = NodeLayout(tree, row_of, wanted, left)
        return cls(tokens, lengths, ids, draft_probs, draft_probs, branches)

    @classmethod
    def from_drafts(cls, drafts: Sequence[Draft], device: torch.device | str = "cpu") -> Proposal:
        """Batch drafts of any sizes; the integer weights become float64 probabilities."""
        lengths = np.array([len(draft) for draft in drafts], dtype=np.int64)
        counts = np.array([len(draft.sizes) for draft in drafts], dtype=np.int64)
        batch, most, rows = len(drafts), int(lengths.max(initial=0)), int(counts.max(initial=0))
        drafted = np.arange(most) < lengths[:, None]
        there = np.arange(rows) < counts[:, None]
        tokens = np.zeros((batch, most), dtype=np.int64)
        sizes = np.zeros((batch, rows), dtype=np.int64)
        tokens[drafted] = [token for draft in drafts for token in draft.token_ids]
        sizes[there] = [size for draft in drafts for size in draft.sizes]
        widest = max(int(sizes.max(initial=0)), 1)
        sent = np.arange(widest) < sizes[..., None]
        ids = np.zeros((batch, rows, widest), dtype=np.int64)
        weights = np.zeros(ids.shape, dtype=np.float64)
        ids[sent] = np.concatenate([draft.ids for draft in drafts])
        weights[sent] = np.concatenate([draft.weights for draft in drafts])
        certain = there & (sizes == 0)
        ids[certain, 0] = [token for draft in drafts for token in draft.certain_tokens()]
        weights[certain, 0] = 1.0
        # Rows beyond a draft's end have no weight; the maximum avoids 0 / 0.
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1.0)
        numbers = [
            torch.from_numpy(array).to(device, non_blocking=True)
            for array in (tokens, lengths, ids, weights)
        ]
        branches = _branches(drafts, most, device)
        return cls(numbers[0], numbers[1], numbers[2], numbers[3], branches=branches)

    @classmethod
    def from_chains(cls, tokens: Tensor, ids: Tensor, weights: Tensor) -> Proposal:
        """Batch chains by their padded rows on any device, without waiting for it.

        A chain ends before its first row without any weight, as in `Draft.batch`: it is padding, or
        its logits were not finite.

        Args:
            tokens: [B, N] int64, drawn from the rows.
            ids: [B, N, K] int64, distinct in each row.
            weights: [B, N, K] int64, 0 for padding.
        """
        totals = weights.sum(-1)
        drafted = (totals > 0).long().cumprod(1)
        # The same quotients of the same integers as in `from_drafts`.
        probs = weights.double() / totals.clamp(min=1).double()[..., None] * drafted[..., None]
        return cls(tokens * drafted, drafted.sum(1), ids, probs)

    @property
    def place_depth(self) -> Tensor | None:
        """[B, N+1] depth of each place; None if depth and place are equal (chains)."""
        return None if self.branches is None else self.branches.tree.depth

    def dense(self, vocab_size: int, dtype: torch.dtype) -> Tensor:
        """Rows of q over the whole vocabulary: [B, R, V] of `dtype`."""
        if self.rows is not None:
            return self.rows.to(dtype)
        shape = (*self.ids.shape[:2], vocab_size)
        rows = torch.zeros(shape, dtype=dtype, device=self.tokens.device)
        return rows.scatter_add_(-1, self.ids, self.probs.to(dtype))

    def overlaps(self, target_probs: Tensor) -> Tensor:
        """[B, N]: Σ_x min(p(x), row(x)) of each node, with p of the place that it hangs at.

        Args:
            target_probs: [B, N+1, V].
        """
        if self.branches is None:
            p, ids, probs = target_probs[:, :-1], self.ids, self.probs
        else:
            each = torch.arange(len(self.tokens), device=self.tokens.device)[:, None]
            p = target_probs[each, self.branches.tree.parents]
            ids, probs = (
                self.ids[each, self.branches.row_of],
                self.probs[each, self.branches.row_of],
            )
        return torch.minimum(p.gather(-1, ids).to(probs.dtype), probs).sum(-1)


def _branches(drafts: Sequence[Draft], most: int, device: torch.device | str) -> NodeLayout | None:
    """The layout of drafts that are not all plain chains; else None."""
    if all(draft.parents is None and draft.row_of is None for draft in drafts):
        return None
    row_of = np.zeros((len(drafts), most), np.int64)
    left = np.ones((len(drafts), most), np.float64)
    for b, draft in enumerate(drafts):
        row_of[b, : len(draft)] = draft.rows_of_nodes()
        if draft.distinct:
            left[b, : len(draft)] = draft.left_by_siblings()
    tree = TreeBatch.of(
        [draft.places() for draft in drafts], [draft.token_ids for draft in drafts], device
    )
    distinct = np.array([draft.distinct for draft in drafts])
    arrays = (torch.from_numpy(array) for array in (row_of, distinct, left))
    return NodeLayout(tree, *(array.to(device, non_blocking=True) for array in arrays))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier decided.

    Attributes:
        place: [B] int64, the place of the last kept node; 0 if none was kept.
        num_accepted: [B] int64, drafted tokens kept: the depth of that place.
        next_token: [B] int64, the correction, or the bonus if a whole path was kept.
        carry: one entry per sequence, for its next round; None for most rules.
        total: [B], of the weights that the next token was drawn from: not finite where one is not,
            and the token is then any. None where they are no more than rows of the target.
    """

    place: Tensor
    num_accepted: Tensor
    next_token: Tensor
    carry: list[Any]
    total: Tensor | None = None
