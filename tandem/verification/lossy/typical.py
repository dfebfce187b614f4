"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1): lossy.

A drafted token is kept if it is likely enough for how uncertain the target is; what the drafter's
probabilities were does not matter. The emitted tokens follow another law than the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.speculation.distribution import draw
from tandem.speculation.proposal import Proposal, Verdict
from tandem.speculation.tree import DraftShape
from tandem.verification.chain import (
    View,
    of_drafted_tokens,
    plain_view,
    row_within,
    up_to_first_failure,
)
from tandem.verification.verifier import RuleOption, Verifier

# Of the paper's code: the logarithm of a probability of 0 is finite.
_LEAST = 1e-5


@dataclass(frozen=True)
class TypicalVerifier(Verifier[View]):
    """Keeps the longest path of tokens with p(x) > min(epsilon, delta * exp(-H(p))).

    H is the entropy of the target's row p, in nats. Of paths of one length the likeliest is kept.
    The next token is drawn from the target's row after it. At temperature 0 each kept token is the
    target's likeliest one, so the text is the plain one.

    Attributes:
        epsilon: the most that is asked of a token's probability.
        delta: what is asked of it where the target is certain.
    """

    name: ClassVar[str] = "lossy_typical"
    lossless: ClassVar[bool] = False
    takes: ClassVar[DraftShape] = DraftShape.TREE
    options: ClassVar[tuple[RuleOption, ...]] = (
        RuleOption("epsilon", 0.09, 0.0, 1.0),
        RuleOption("delta", 0.3, 0.0, 1.0),
    )

    epsilon: float = 0.09
    delta: float = 0.3

    def verify(
        self,
        proposal: Proposal,
        target_probs: Tensor,
        uniforms: Tensor,
        carry: Sequence[Any] | None = None,
    ) -> Verdict:
        """See `Verifier`; only the next token is random."""
        tokens, p = proposal.tokens, target_probs
        batch, most = tokens.shape
        layout = proposal.branches
        own = torch.arange(most, device=tokens.device)
        parents = own.expand(batch, most) if layout is None else layout.tree.parents
        drafted = own < proposal.lengths[:, None]
        row = p.gather(1, parents[..., None].expand(-1, -1, p.shape[-1]))
        chance = row.gather(2, tokens[..., None])[..., 0]
        passed = drafted & (chance > self._asked(p).gather(1, parents))
        # By place: whether the path to it passed, its length, and the logarithm of its probability.
        reached = pad(torch.zeros_like(passed), (1, 0), value=True)
        depth = torch.zeros_like(reached, dtype=torch.int64)
        likely = torch.zeros(reached.shape, dtype=torch.float64, device=p.device)
        logs = chance.double().clamp(min=1e-300).log()
        longest = most if layout is None else layout.tree.paths
        for _ in range(longest):
            reached = pad(passed & reached.gather(1, parents), (1, 0), value=True)
            depth = pad(1 + depth.gather(1, parents), (1, 0))
            likely = pad(logs + likely.gather(1, parents), (1, 0))
        depth = torch.where(reached, depth, -1)
        deepest = depth == depth.max(1, keepdim=True).values
        place = torch.where(deepest, likely, -torch.inf).argmax(1)
        if layout is not None:
            place = pad(layout.tree.home, (1, 0)).gather(1, place[:, None])[:, 0]
        kept = depth.gather(1, place[:, None])[:, 0]
        law = p[torch.arange(batch, device=p.device), place]
        return Verdict(place, kept, draw(law, uniforms[:, -1]), [None] * batch)

    def _asked(self, p: Tensor) -> Tensor:
        """[...]: the least probability of a kept token after rows [..., V]."""
        entropy = -(p * (p + _LEAST).log()).sum(-1)
        return (self.delta * (-entropy).exp()).clamp(max=self.epsilon)

    def count_accepted(self, passed: Tensor) -> Tensor:
        """Up to the first failure."""
        return up_to_first_failure(passed)

    def _view(self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None) -> View:
        return plain_view(proposal, target_probs)

    def _accept(self, view: View) -> Tensor:
        asked = self._asked(view.p[:, :-1])
        chance = of_drafted_tokens(view.p[:, :-1], view.proposal)
        return (view.drafted & (chance > asked)).to(view.p.dtype)

    def _residual(self, view: View, num_accepted: Tensor) -> Tensor:
        return row_within(view.p, num_accepted)
