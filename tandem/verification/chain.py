"""A batch of chains, in the form that rules work on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from tandem.verification.ratios import ratios


@dataclass(frozen=True)
class View:
    """A batch of rounds, in the form that a rule works on; rules add derived tensors.

    Attributes:
        proposal: the drafts, all chains.
        p: [B, G+1, V], the target's rows.
        q: [B, G, V], the drafter's rows.
        ratios: [B, G], p / q of each drafted token.
    """

    proposal: Proposal
    p: Tensor
    q: Tensor
    ratios: Tensor

    @property
    def gamma(self) -> int:
        """Longest draft of the batch."""
        return self.q.shape[1]

    @property
    def drafted(self) -> Tensor:
        """[B, G] mask of the rows that hold a drafted token."""
        places = torch.arange(self.gamma, device=self.q.device)
        return places < self.proposal.lengths[:, None]

    @property
    def ends(self) -> Tensor:
        """[B, G] mask of each draft's last row."""
        places = torch.arange(1, self.gamma + 1, device=self.q.device)
        return places == self.proposal.lengths[:, None]

    def kept_all(self, num_accepted: Tensor) -> Tensor:
        """[B, 1] mask of the sequences whose whole draft was kept."""
        return (num_accepted >= self.proposal.lengths)[:, None]


def plain_view(proposal: Proposal, target_probs: Tensor) -> View:
    """The view of a rule without state."""
    q = proposal.dense(target_probs.shape[-1], target_probs.dtype)
    return View(
        proposal,
        target_probs,
        q,
        ratios(of_drafted_tokens(target_probs[:, :-1], proposal), of_drafted_tokens(q, proposal)),
    )


def up_to_first_failure(passed: Tensor) -> Tensor:
    """[B] length of the run of passes that starts each row of `passed` [B, G]."""
    return passed.long().cumprod(-1).sum(-1)


def last_success(passed: Tensor) -> Tensor:
    """[B] one-based place of the last pass in each row of `passed` [B, G], 0 if none."""
    places = torch.arange(1, passed.shape[1] + 1, device=passed.device)
    return torch.nn.functional.pad(passed * places, (1, 0)).amax(-1)


def of_drafted_tokens(rows: Tensor, proposal: Proposal) -> Tensor:
    """[B, G]: the entry of each row [B, G, V] that belongs to its drafted token."""
    return rows.gather(-1, proposal.tokens[..., None])[..., 0]


def correction(excess: Tensor, p: Tensor, kept_all: Tensor) -> Tensor:
    """Weights [B, V] of the token after the kept ones; `excess` is overwritten.

    The positive part of `excess`; p itself if all tokens were kept [B, 1], or if rounding left no
    positive part.
    """
    weights = excess.clamp_(min=0)
    return torch.where(kept_all | (weights.sum(-1, keepdim=True) <= 0), p, weights)


def row_within(rows: Tensor, place: Tensor) -> Tensor:
    """[B, V]: row `place` [B] of each of rows [B, N, V]; beyond the end, the last row.

    For rows of q, which are not used if the whole draft was kept.
    """
    batch, count, vocab_size = rows.shape
    if count == 0:
        return rows.new_zeros(batch, vocab_size)
    return rows[torch.arange(batch, device=rows.device), place.clamp(max=count - 1)]


def row_at(rows: Tensor, place: Tensor) -> Tensor:
    """[B, V]: row `place` [B] of each of rows [B, N, V]; beyond the end, zeros."""
    return torch.where(place[:, None] < rows.shape[1], row_within(rows, place), 0.0)


def residual_or(excess: Tensor, fallback: Tensor) -> Tensor:
    """The positive part of `excess` [B, V]; for rows where rounding left none, `fallback`."""
    weights = excess.clamp(min=0)
    empty = weights.sum(-1, keepdim=True) <= 0
    return torch.where(empty, fallback, weights)
