"""What a verifier is given, and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        batch, gamma = len(drafts), max((len(draft) for draft in drafts), default=0)
        widest = max((int(d.support_sizes.max(initial=1)) for d in drafts), default=1)
        tokens = np.zeros((batch, gamma), dtype=np.int64)
        ids = np.zeros((batch, gamma, max(widest, 1)), dtype=np.int64)
        probs = np.zeros(ids.shape, dtype=np.float64)
        for b, draft in enumerate(drafts):
            tokens[b, : len(draft)] = draft.token_ids
            start = 0
            for i, size in enumerate(draft.support_sizes.tolist()):
                if size == 0:
                    ids[b, i, 0], probs[b, i, 0] = draft.token_ids[i], 1.0
                    continue
                end = start + size
                ids[b, i, :size] = draft.support_ids[start:end]
                weights = draft.weights[start:end]
                probs[b, i, :size] = weights / weights.sum(dtype=np.int64)
                start = end
        lengths = np.array([len(draft) for draft in drafts], dtype=np.int64)
        return cls(*(torch.from_numpy(a).to(device) for a in (tokens, lengths, ids, probs)))

    def dense(self, vocab_size: int, dtype: torch.dtype) -> Tensor:
        """Rows of q over the whole vocabulary: [B, G, V] of `dtype`."""
        if self.rows is not None:
            return self.rows.to(dtype)
        shape = (*self.tokens.shape, vocab_size)
        rows = torch.zeros(shape, dtype=dtype, device=self.tokens.device)
        return rows.scatter_add_(-1, self.ids, self.probs.to(dtype))

    def with_rows(self, vocab_size: int, dtype: torch.dtype) -> Proposal:
        """The same proposal with its dense rows at hand, for those who need them repeatedly."""
        return replace(self, rows=self.dense(vocab_size, dtype))


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
