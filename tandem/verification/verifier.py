"""What every verification rule is made of.

A rule turns a draft, the target's rows and random numbers into how many drafted tokens to
keep and what follows them. All of it is batched, pure, on the device of its inputs, and in
the dtype of `target_probs` (float32 in service; the tests enumerate the same code in
float64). Nothing here synchronises with the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from tandem.speculation.distribution import draw
from tandem.speculation.draft import Shape
from tandem.speculation.proposal import Proposal, Verdict
from tandem.verification.fused import FusedVerdict

# Far beyond any ratio that a draft reaches with a probability that matters, and its square
# still fits float32.
MAX_RATIO = 1e18


@dataclass(frozen=True)
class View:
    """A batch of rounds as a rule sees it; rules add what they derive from it.

    Attributes:
        proposal: the drafts.
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


W = TypeVar("W", bound=View)


class Verifier(ABC, Generic[W]):
    """A verification rule (VERIFY of arXiv 2403.10444, Algorithm 3).

    Attributes:
        name: as requests name it.
        lossless: whether the emitted tokens follow the target's law exactly.
        takes: the widest kind of draft that it can decide.
        needs_pure: whether it is exact only for rows that are functions of the tokens before
            them alone, wherever the round began.
        fixed_gamma: whether it is exact only if every draft of a text has the same length, up to
            the text's very end.
        resumable: whether the emitted tokens say all that is needed to go on behind them.
        fused: the same rule as a kernel for a CPU, where there is one; see `kernel`.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    takes: ClassVar[Shape] = Shape.CHAIN
    needs_pure: ClassVar[bool] = False
    fixed_gamma: ClassVar[bool] = False
    resumable: ClassVar[bool] = True
    fused: ClassVar[FusedVerdict | None] = None

    @property
    def kernel(self) -> FusedVerdict | None:
        """The class's own `fused`: a class that changes another's rule has not its kernel."""
        fused = vars(type(self)).get("fused")
        return fused.__func__ if isinstance(fused, staticmethod) else fused

    def accept_probabilities(
        self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None = None
    ) -> Tensor:
        """h[B, G]: row i of a draft is accepted iff its uniform is < h. 0 beyond its length.

        Args:
            proposal: drafts [B, G] with their rows of q.
            target_probs: [B, G+1, V]; row i is p in the context of the first i drafted tokens.
            carry: one entry a sequence, from its last verdict; None for all at the start.
        """
        return self._accept(self._view(proposal, target_probs, carry))

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
        return self._residual(self._view(proposal, target_probs, carry), num_accepted)

    def next_carry(self, proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> list[Any]:
        """The state for the next round; `verdict.carry` holds the state of this one."""
        view = self._view(proposal, target_probs, verdict.carry)
        return self._carry(view, verdict.num_accepted, verdict.next_token)

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
        view = self._view(proposal, target_probs, carry)
        # Strictly less: 0 does occur among uniforms, and u <= 0 would emit a token of
        # probability 0.
        num_accepted = self.count_accepted(uniforms[:, :-1] < self._accept(view))
        next_token = draw(self._residual(view, num_accepted), uniforms[:, -1])
        return Verdict(num_accepted, next_token, self._carry(view, num_accepted, next_token))

    def carry_from(self, levels: Sequence[tuple[float, int]], gamma: int) -> Any:
        """The state that another target returned, as (log ratio, count) pairs.

        Raises:
            ValueError: no such state can be; the sentence goes on behind a field's name.
        """
        if levels:
            raise ValueError(f"{self.name} has no state to go on from")
        return None

    def pack(self, carry: Sequence[Any], gamma: int) -> Tensor:
        """[B, N] float64: a batch's states as numbers, for the host and for a kernel.

        None of them, N = 0, for a rule without state.

        Args:
            carry: one entry a sequence; None for one at the start.
            gamma: longest draft of the round, whose levels have to fit as well.
        """
        return torch.zeros(len(carry), 0, dtype=torch.float64)

    def unpack(self, packed: Tensor) -> list[Any]:
        """The states again, one a row of `pack`."""
        return [None] * len(packed)

    def levels_of(self, packed: Sequence[float]) -> list[tuple[float, int]]:
        """One sequence's (log ratio, count) pairs, from its row of `pack`."""
        return []

    @abstractmethod
    def count_accepted(self, passed: Tensor) -> Tensor:
        """[B]: how many tokens to keep, given which rows [B, G] passed."""

    @abstractmethod
    def _view(self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None) -> W:
        """What the other methods need, computed once."""

    @abstractmethod
    def _accept(self, view: W) -> Tensor:
        """See `accept_probabilities`."""

    @abstractmethod
    def _residual(self, view: W, num_accepted: Tensor) -> Tensor:
        """See `residual_weights`."""

    def _carry(self, view: W, num_accepted: Tensor, next_token: Tensor) -> list[Any]:
        """See `next_carry`. Most rules carry nothing."""
        return [None] * len(num_accepted)


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


def ratios(p: Tensor, q: Tensor) -> Tensor:
    """p / q, finite. Where both are 0 the event has probability 0 and 1 (accept) will do."""
    unbounded = torch.where(p == 0, 1.0, MAX_RATIO)
    return torch.where(q == 0, unbounded, (p / q).clamp(max=MAX_RATIO))


def correction(excess: Tensor, p: Tensor, kept_all: Tensor) -> Tensor:
    """Weights [B, V] of what follows the kept tokens; `excess` is used up.

    Its positive part; or p itself where all were kept [B, 1], and where rounding left none.
    """
    weights = excess.clamp_(min=0)
    return torch.where(kept_all | (weights.sum(-1, keepdim=True) <= 0), p, weights)


def row_within(rows: Tensor, place: Tensor) -> Tensor:
    """[B, V]: row `place` [B] of each of rows [B, N, V]; the last one beyond it.

    For rows of q, which are not looked at where the whole draft was kept.
    """
    batch, count, vocab_size = rows.shape
    if count == 0:
        return rows.new_zeros(batch, vocab_size)
    return rows[torch.arange(batch, device=rows.device), place.clamp(max=count - 1)]


def row_at(rows: Tensor, place: Tensor) -> Tensor:
    """[B, V]: row `place` [B] of each of rows [B, N, V]; zeros one place behind the last."""
    return torch.where(place[:, None] < rows.shape[1], row_within(rows, place), 0.0)


def residual_or(excess: Tensor, fallback: Tensor) -> Tensor:
    """The positive part of `excess` [B, V]; `fallback` where rounding left none in a row."""
    weights = excess.clamp(min=0)
    empty = weights.sum(-1, keepdim=True) <= 0
    return torch.where(empty, fallback, weights)
