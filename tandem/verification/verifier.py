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
from tandem.speculation.nodes import DraftShape
from tandem.speculation.proposal import Proposal, Verdict
from tandem.verification.chain import View
from tandem.verification.kernels.chains import FusedVerdict
from tandem.verification.kernels.trees import FusedTreeVerdict
from tandem.verification.tree import Judged, TreeRule

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
        fused: the same rule on chains as a kernel for a CPU, where there is one; see `kernel`.
        trees: the same rule on trees; None for one that takes chains alone.
        fused_tree: that as a kernel for a CPU, where there is one; see `tree_kernel`.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    takes: ClassVar[DraftShape] = DraftShape.CHAIN
    needs_pure: ClassVar[bool] = False
    fixed_gamma: ClassVar[bool] = False
    resumable: ClassVar[bool] = True
    fused: ClassVar[FusedVerdict | None] = None
    trees: ClassVar[TreeRule | None] = None
    fused_tree: ClassVar[FusedTreeVerdict | None] = None

    @property
    def kernel(self) -> FusedVerdict | None:
        """The class's own `fused`: a class that changes another's rule has not its kernel."""
        fused = vars(type(self)).get("fused")
        return fused.__func__ if isinstance(fused, staticmethod) else fused

    @property
    def tree_kernel(self) -> FusedTreeVerdict | None:
        """The class's own `fused_tree`, for a rule without state."""
        fused = vars(type(self)).get("fused_tree")
        return fused.__func__ if isinstance(fused, staticmethod) else fused

    def accept_probabilities(
        self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None = None
    ) -> Tensor:
        """h[B, N]: node i of a draft passes iff its uniform is < h. 0 beyond its length.

        A node is tested in one state at most: its ancestors are kept or not judged yet, and all
        that is tested before it has failed.

        Args:
            proposal: drafts [B, N] with their rows of q.
            target_probs: [B, N+1, V]; row s is p behind the tokens that lead to place s.
            carry: one entry a sequence, from its last verdict; None for all at the start.

        Raises:
            ValueError: the rule takes no such drafts.
        """
        return self.judged(proposal, target_probs, carry).accept()

    def residual_weights(
        self,
        proposal: Proposal,
        target_probs: Tensor,
        place: Tensor,
        carry: Sequence[Any] | None = None,
    ) -> Tensor:
        """w[B, V]: unnormalised law of the correction at the place [B] of the last kept node.

        Where nothing hangs there it is the target's own row (the bonus).
        """
        return self.judged(proposal, target_probs, carry).residual(place)

    def stop(self, proposal: Proposal, passed: Tensor) -> Tensor:
        """[B]: the place of the last node to keep, given which nodes [B, N] passed."""
        if proposal.branches is None:
            return self.count_accepted(passed)
        return self._for_trees().stop(proposal.branches.tree, passed)

    def next_carry(self, proposal: Proposal, target_probs: Tensor, verdict: Verdict) -> list[Any]:
        """The state for the next round; `verdict.carry` holds the state of this one."""
        judged = self.judged(proposal, target_probs, verdict.carry)
        return judged.carry(verdict.place, verdict.next_token)

    def verify(
        self,
        proposal: Proposal,
        target_probs: Tensor,
        uniforms: Tensor,
        carry: Sequence[Any] | None = None,
    ) -> Verdict:
        """Decide one round for a batch.

        Args:
            proposal: drafts [B, N] with their rows of q.
            target_probs: [B, N+1, V].
            uniforms: [B, N+1] float64 in [0, 1): column i decides node i, the last one draws
                the correction or bonus.
            carry: one entry a sequence, from its last verdict; None for all at the start.

        Raises:
            ValueError: the rule takes no such drafts.
        """
        judged = self.judged(proposal, target_probs, carry)
        # Strictly less: 0 does occur among uniforms, and u <= 0 would emit a token of
        # probability 0.
        place = self.stop(proposal, uniforms[:, :-1] < judged.accept())
        next_token = draw(judged.residual(place), uniforms[:, -1])
        depth = proposal.place_depth
        kept = place if depth is None else depth.gather(1, place[:, None])[:, 0]
        return Verdict(place, kept, next_token, judged.carry(place, next_token))

    def judged(
        self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None = None
    ) -> Judged:
        """What `accept_probabilities` and `residual_weights` read their answers from.

        Raises:
            ValueError: the rule takes no such drafts.
        """
        if proposal.branches is None:
            return _Chains(self, self._view(proposal, target_probs, carry))
        return self._for_trees().judge(proposal, target_probs)

    def _for_trees(self) -> TreeRule:
        if self.trees is None:
            raise ValueError(f"{self.name} takes chains alone")
        return self.trees

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
        """[B]: how many tokens of a chain to keep, given which rows [B, G] passed."""

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


@dataclass(frozen=True)
class _Chains(Generic[W]):
    """A batch of chains, judged by their rule's own methods."""

    rule: Verifier[W]
    view: W

    def accept(self) -> Tensor:
        return self.rule._accept(self.view)

    def residual(self, place: Tensor) -> Tensor:
        return self.rule._residual(self.view, place)

    def carry(self, place: Tensor, next_token: Tensor) -> list[Any]:
        return self.rule._carry(self.view, place, next_token)
