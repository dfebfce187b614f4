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
        drafted = np.arange(gamma) < lengths[:, None]
        tokens = np.zeros((batch, gamma), dtype=np.int64)
        sizes = np.zeros((batch, gamma), dtype=np.int64)
        tokens[drafted] = [token for draft in drafts for token in draft.token_ids]
        sizes[drafted] = [size for draft in drafts for size in draft.sizes]
        widest = max(int(sizes.max(initial=0)), 1)
        sent = np.arange(widest) < sizes[..., None]
        ids = np.zeros((batch, gamma, widest), dtype=np.int64)
        weights = np.zeros(ids.shape, dtype=np.float64)
        ids[sent] = np.concatenate([draft.ids for draft in drafts])
        weights[sent] = np.concatenate([draft.weights for draft in drafts])
        certain = drafted & (sizes == 0)
        ids[certain, 0], weights[certain, 0] = tokens[certain], 1.0
        # Rows behind a draft's end have no weight, and stay without.
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1.0)
        arrays = (tokens, lengths, ids, weights)
        return cls(*(torch.from_numpy(a).to(device, non_blocking=True) for a in arrays))

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
