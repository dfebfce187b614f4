"""What every verification rule is made of.

A rule turns a draft, the target's rows and random numbers into how many drafted tokens to
keep and what follows them. All of it is batched, pure, on the device of its inputs, and in
the dtype of `target_probs` (float32 in service; the tests enumerate the same code in
float64). Nothing here synchronises with the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tandem.speculation.distribution import draw
from tandem.speculation.proposal import Proposal, Verdict

# Far beyond any ratio that a draft reaches with a probability that matters, and its square
# still fits float32.
MAX_RATIO = 1e18


class Verifier(ABC):
    """A verification rule (VERIFY of arXiv 2403.10444, Algorithm 3).

    Attributes:
        name: as requests name it.
        lossless: whether the emitted tokens follow the target's law exactly.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]

    @abstractmethod
    def accept_probabilities(
        self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None = None
    ) -> Tensor:
        """h[B, G]: row i of a draft is accepted iff its uniform is < h. 0 beyond its length.

        Args:
            proposal: drafts [B, G] with their rows of q.
            target_probs: [B, G+1, V]; row i is p in the context of the first i drafted tokens.
            carry: one entry a sequence, from its last verdict.
        """

    @abstractmethod
    def residual_weights(
        self,
        proposal: Proposal,
        target_probs: Tensor,
        num_accepted: Tensor,
        carry: Sequence[Any] | None = None,
    ) -> Tensor:
        """w[B, V]: unnormalised law of the correction after `num_accepted` [B] kept tokens.

        Where all were kept it is the target's own row (the bonus).
        """

    @abstractmethod
    def count_accepted(self, passed: Tensor) -> Tensor:
        """[B]: how many tokens to keep, given which rows [B, G] passed."""

    def next_carry(self, proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> list[Any]:
        """The state for the next round; `verdict.carry` holds the state of this one."""
        return [None] * len(verdict.carry)

    def verify(
        self,
        proposal: Proposal,
        target_probs: Tensor,
        uniforms: Tensor,
        carry: Sequence[Any] | None = None,
    ) -> Verdict:
        """Decide one round for a batch.

        Args:
            proposal: drafts [B, G] with their rows of q.
            target_probs: [B, G+1, V].
            uniforms: [B, G+1] float64 in [0, 1): column i decides row i, the last one draws
                the correction or bonus.
            carry: one entry a sequence, from its last verdict; None for all at the start.
        """
        given = list(carry) if carry is not None else [None] * target_probs.shape[0]
        h = self.accept_probabilities(proposal, target_probs, given)
        # Strictly less: 0 does occur among uniforms, and u <= 0 would emit a token of
        # probability 0.
        num_accepted = self.count_accepted(uniforms[:, :-1] < h)
        weights = self.residual_weights(proposal, target_probs, num_accepted, given)
        verdict = Verdict(num_accepted, draw(weights, uniforms[:, -1]), given)
        return Verdict(
            verdict.num_accepted,
            verdict.next_token,
            self.next_carry(proposal, target_probs, verdict),
        )


def up_to_first_failure(passed: Tensor) -> Tensor:
    """[B] length of the run of passes that starts each row of `passed` [B, G]."""
    return passed.long().cumprod(-1).sum(-1)


def last_success(passed: Tensor) -> Tensor:
    """[B] one-based place of the last pass in each row of `passed` [B, G], 0 if none."""
    places = torch.arange(1, passed.shape[1] + 1, device=passed.device)
    return torch.cat((passed.new_zeros(passed.shape[0], 1).long(), passed * places), 1).amax(-1)


def drafted(proposal: Proposal) -> Tensor:
    """[B, G] mask of the rows that hold a drafted token."""
    places = torch.arange(proposal.tokens.shape[1], device=proposal.tokens.device)
    return places < proposal.lengths[:, None]


def of_drafted_tokens(rows: Tensor, proposal: Proposal) -> Tensor:
    """[B, G]: the entry of each row [B, G, V] that belongs to its drafted token."""
    return rows.gather(-1, proposal.tokens[..., None])[..., 0]


def ratios(p: Tensor, q: Tensor) -> Tensor:
    """p / q, finite. Where both are 0 the event has probability 0 and 1 (accept) will do."""
    unbounded = torch.where(p == 0, 1.0, MAX_RATIO)
    return torch.where(q == 0, unbounded, (p / q).clamp(max=MAX_RATIO))


def row_at(rows: Tensor, place: Tensor) -> Tensor:
    """[B, V]: row `place` [B] of each of rows [B, N, V]."""
    index = place[:, None, None].expand(-1, 1, rows.shape[-1])
    return rows.gather(1, index)[:, 0]


def padded(draft_probs: Tensor) -> Tensor:
    """[B, G+1, V]: rows of q with a zero row behind, where the bonus has none."""
    return torch.nn.functional.pad(draft_probs, (0, 0, 0, 1))


def positive_or(weights: Tensor, fallback: Tensor) -> Tensor:
    """`weights` [B, V], but `fallback` where rounding left a row without any weight."""
    empty = weights.sum(-1, keepdim=True) <= 0
    return torch.where(empty, fallback, weights)
