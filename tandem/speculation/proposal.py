"""What a verifier is given, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.speculation.draft import Draft


@dataclass(frozen=True, slots=True)
class Proposal:
    """The drafts of a batch of sequences, with the distributions they were drawn from.

    Attributes:
        tokens: [B, G] int64; entries at or beyond a row's length are padding (0).
        lengths: [B] int64, each 0..G; 0 means no draft.
        ids: [B, G, K] int64 token ids of the rows of q; padding has probability 0.
        probs: [B, G, K] their probabilities, float32 or float64.
        rows: [B, G, V] the same rows over the whole vocabulary, where they are known.
    """

    tokens: Tensor
    lengths: Tensor
    ids: Tensor
    probs: Tensor
    rows: Tensor | None = None

    @classmethod
    def from_dense(
        cls, tokens: Tensor, draft_probs: Tensor, lengths: Tensor | None = None
    ) -> Proposal:
        """Wrap dense rows of q as they are, without quantising.

        Args:
            tokens: [B, G] int64.
            draft_probs: [B, G, V].
            lengths: [B] int64; all G by default.
        """
        batch, gamma, vocab_size = draft_probs.shape
        if lengths is None:
            lengths = torch.full((batch,), gamma, dtype=torch.int64, device=tokens.device)
        ids = torch.arange(vocab_size, device=tokens.device).expand(batch, gamma, vocab_size)
        return cls(tokens, lengths, ids, draft_probs, draft_probs)

    @classmethod
    def from_drafts(cls, drafts: Sequence[Draft], device: torch.device | str = "cpu") -> Proposal:
        """Batch drafts of any lengths; the integer weights become float64 probabilities."""
        lengths = np.array([len(draft) for draft in drafts], dtype=np.int64)
        batch, gamma = len(drafts), int(lengths.max(initial=0))
        sizes = np.concatenate([draft.support_sizes for draft in drafts])
        token_ids = np.concatenate([draft.token_ids for draft in drafts])
        weights = np.concatenate([draft.weights for draft in drafts])
        # Where each row [R] and each entry [E] of the drafts goes.
        places = np.flatnonzero(np.arange(gamma) < lengths[:, None])
        rows = np.repeat(np.arange(len(sizes)), sizes)
        columns = np.arange(len(rows)) - np.repeat(sizes.cumsum() - sizes, sizes)
        tokens = np.zeros(batch * gamma, dtype=np.int64)
        ids = np.zeros((batch * gamma, max(int(sizes.max(initial=0)), 1)), dtype=np.int64)
        probs = np.zeros(ids.shape, dtype=np.float64)
        tokens[places] = token_ids
        totals = np.bincount(rows, weights, minlength=len(sizes))
        ids[places[rows], columns] = np.concatenate([draft.support_ids for draft in drafts])
        probs[places[rows], columns] = weights / totals[rows]
        one_hot = sizes == 0
        ids[places[one_hot], 0], probs[places[one_hot], 0] = token_ids[one_hot], 1.0
        return cls(
            *(
                torch.from_numpy(array.reshape(shape)).to(device, non_blocking=True)
                for array, shape in (
                    (tokens, (batch, gamma)),
                    (lengths, (batch,)),
                    (ids, (batch, gamma, ids.shape[1])),
                    (probs, (batch, gamma, ids.shape[1])),
                )
            )
        )

    def to(self, device: torch.device) -> Proposal:
        """The same on another device."""
        if self.tokens.device == device:
            return self
        tensors = (self.tokens, self.lengths, self.ids, self.probs)
        return Proposal(*(tensor.to(device, non_blocking=True) for tensor in tensors))

    def dense(self, vocab_size: int, dtype: torch.dtype) -> Tensor:
        """Rows of q over the whole vocabulary: [B, G, V] of `dtype`."""
        if self.rows is not None:
            return self.rows.to(dtype)
        shape = (*self.tokens.shape, vocab_size)
        rows = torch.zeros(shape, dtype=dtype, device=self.tokens.device)
        return rows.scatter_add_(-1, self.ids, self.probs.to(dtype))

    def overlaps(self, target_probs: Tensor) -> Tensor:
        """[B, G]: Σ_x min(p(x), q(x)) of each drafted position.

        Args:
            target_probs: [B, G+1, V].
        """
        p = target_probs[:, :-1].gather(-1, self.ids)
        return torch.minimum(p.to(self.probs.dtype), self.probs).sum(-1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier decided.

    Attributes:
        num_accepted: [B] int64, drafted tokens kept.
        next_token: [B] int64, the correction, or the bonus where all were kept.
        carry: one entry a sequence, to be given to its next round; None for most rules.
    """

    num_accepted: Tensor
    next_token: Tensor
    carry: list[Any]
