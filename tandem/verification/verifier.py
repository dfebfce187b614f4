"""The base class of verification rules.

From a draft, the target's rows and random numbers, a rule decides how many drafted tokens to keep
and which token follows them. The code is batched and pure, and runs on the device of its inputs in
the dtype of `target_probs` (float32 in service; the tests enumerate the same code in float64).
Nothing here synchronises with the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from tandem.speculation.distribution import draw
from tandem.speculation.proposal import Proposal, Verdict
from tandem.speculation.tree import DraftShape
from tandem.verification.chain import View
from tandem.verification.kernels.chains import FusedVerdict
from tandem.verification.kernels.trees import FusedTreeVerdict
from tandem.verification.tree import Judgement, TreeRule

W = TypeVar("W", bound=View)


class RuleOption(NamedTuple):
    """A number that a request may set for a rule.

    Attributes:
        name: in requests.
        default: its value.
        least: the smallest that it may be.
        most: the largest.
    """

    name: str
    default: float
    least: float
    most: float


class Verifier(ABC, Generic[W]):
    """A verification rule (VERIFY of arXiv 2403.10444, Algorithm 3).

    Attributes:
        name: in requests.
        lossless: whether the emitted tokens follow the target's law exactly.
        takes: the widest kind of draft that the rule can decide.
        needs_every_draft: whether the rule carries a change of the target's law from round to
            round. It is exact only if all drafts of a text have the same length, up to the text's
            very end, and each row depends on the tokens before it alone, wherever the round began
            (a drafter that is `pure`); and a text cannot go on from its emitted tokens alone.
        fused: the rule on chains as a kernel for a CPU, if there is one; see `kernel`.
        trees: the rule on trees; None if it takes chains only.
        options: numbers that a request may set, as `with_options` takes them.
        fused_tree: the rule on trees as a kernel for a CPU, if there is one; see `tree_kernel`.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    takes: ClassVar[DraftShape] = DraftShape.CHAIN
    needs_every_draft: ClassVar[bool] = False
    fused: ClassVar[FusedVerdict | None] = None
    trees: ClassVar[TreeRule | None] = None
    fused_tree: ClassVar[FusedTreeVerdict | None] = None
    options: ClassVar[tuple[RuleOption, ...]] = ()

    def with_options(self, values: Mapping[str, float]) -> Verifier[W]:
        """The rule with some of its options set.

        Raises:
            ValueError: it has no such option, or the value is out of range; the message begins with
                the option's name.
        """
        if values:
            known = {option.name: option for option in self.options}
            for name, value in values.items():
                if name not in known:
                    raise ValueError(f"{name} is no option of {self.name}: {list(known)}")
                least, most = known[name].least, known[name].most
                if not least <= value <= most:
                    raise ValueError(f"{name} must be {least:g}..{most:g}, got {value:g}")
            # A rule with options is a dataclass with a field for each.
            return replace(self, **values)  # type: ignore[type-var]
        return self

    def suits(self, shape: DraftShape, *, pure: bool) -> bool:
        """Whether it decides drafts of a shape. A rule for trees takes independent chains too."""
        taken = shape in (DraftShape.CHAIN, self.takes) or self.takes is DraftShape.TREE
        return taken and (pure or not self.needs_every_draft)

    @property
    def kernel(self) -> FusedVerdict | None:
        """The class's own `fused`, not an inherited one: a subclass may change the rule."""
        fused = vars(type(self)).get("fused")
        return fused.__func__ if isinstance(fused, staticmethod) else fused

    @property
    def tree_kernel(self) -> FusedTreeVerdict | None:
        """The class's own `fused_tree`, as in `kernel`; only for rules without state."""
        fused = vars(type(self)).get("fused_tree")
        return fused.__func__ if isinstance(fused, staticmethod) else fused

    def accept_probabilities(
        self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None = None
    ) -> Tensor:
        """h[B, N]: node i of a draft passes iff its uniform is < h. 0 beyond the draft's length.

        h is well defined because a node is only ever tested in one state: its ancestors are kept or
        not judged yet, and all nodes tested before it have failed.

        Args:
            proposal: drafts [B, N] with their rows of q.
            target_probs: [B, N+1, V]; row s is p after the tokens that lead to place s.
            carry: one entry per sequence, from its last verdict; None if all are at the start.

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

        At a place without children it is the target's own row (for the bonus).
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
            carry: one entry per sequence, from its last verdict; None if all are at the start.

        Raises:
            ValueError: the rule takes no such drafts.
        """
        judged = self.judged(proposal, target_probs, carry)
        # Strictly less: 0 does occur among uniforms, and u <= 0 would emit a token of
        # probability 0.
        place = self.stop(proposal, uniforms[:, :-1] < judged.accept())
        weights = judged.residual(place)
        next_token = draw(weights, uniforms[:, -1])
        depth = proposal.place_depth
        kept = place if depth is None else depth.gather(1, place[:, None])[:, 0]
        return Verdict(place, kept, next_token, judged.carry(place, next_token), weights.sum(-1))

    def judged(
        self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None = None
    ) -> Judgement:
        """The judgement behind `accept_probabilities` and `residual_weights`.

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
        """The state from (log ratio, count) pairs that another target returned.

        Raises:
            ValueError: no such state is possible; the message is meant to follow a field's name.
        """
        if levels:
            raise ValueError(f"{self.name} has no state to go on from")
        return None

    def pack(self, carry: Sequence[Any], gamma: int) -> Tensor:
        """[B, N] float64: a batch's states as numbers, for the host and for a kernel.

        N is 0 for a rule without state.

        Args:
            carry: one entry per sequence; None for one at the start.
            gamma: longest draft of the round; there must be room for its levels too.
        """
        return torch.zeros(len(carry), 0, dtype=torch.float64)

    def unpack(self, packed: Tensor) -> list[Any]:
        """The states from the rows of `pack`."""
        return [None] * len(packed)

    def levels_of(self, packed: Sequence[float]) -> list[tuple[float, int]]:
        """One sequence's (log ratio, count) pairs, from its row of `pack`."""
        return []

    @abstractmethod
    def count_accepted(self, passed: Tensor) -> Tensor:
        """[B]: how many tokens of a chain to keep, given which rows [B, G] passed."""

    @abstractmethod
    def _view(self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None) -> W:
        """Compute once what the other methods need."""

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
