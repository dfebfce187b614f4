"""What rules share that test each drafted token alone and put the target's likeliest one after."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tandem.speculation.proposal import Proposal
from tandem.speculation.tree import DraftShape
from tandem.verification.chain import (
    View,
    plain_view,
    row_within,
    up_to_first_failure,
)
from tandem.verification.tree import Judgement, first_passed_child
from tandem.verification.verifier import Verifier


class LikeliestBehind(Verifier[View]):
    """Keeps tokens from the root on as long as they pass, the first sibling that does; then comes
    the target's likeliest token.

    Nothing is random. The rows are the target's at the request's temperature. At temperature 0 they
    are all on one token, so the text is the plain greedy one; the papers' greedy decoding, which
    tests the model's own probabilities, is these rules at temperature 1.
    """

    lossless: ClassVar[bool] = False
    takes: ClassVar[DraftShape] = DraftShape.TREE

    @abstractmethod
    def passes(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """[B, N]: which tokens [B, N] are good enough in the target's rows [B, N, V]."""

    def judged(
        self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None = None
    ) -> Judgement:
        """See `Verifier`."""
        tokens = proposal.tokens
        own = torch.arange(tokens.shape[1], device=tokens.device)
        branches = proposal.branches
        parents = own.expand(len(tokens), -1) if branches is None else branches.tree.parents
        rows = target_probs.gather(1, parents[..., None].expand(-1, -1, target_probs.shape[-1]))
        passed = self.passes(rows, tokens) & (own < proposal.lengths[:, None])
        return _Tested(passed.to(target_probs.dtype), target_probs)

    def stop(self, proposal: Proposal, passed: Tensor) -> Tensor:
        """See `Verifier`."""
        if proposal.branches is None:
            return self.count_accepted(passed)
        return first_passed_child(proposal.branches.tree, passed)

    def count_accepted(self, passed: Tensor) -> Tensor:
        """Up to the first failure."""
        return up_to_first_failure(passed)

    def _view(self, proposal: Proposal, target_probs: Tensor, carry: Sequence[Any] | None) -> View:
        return plain_view(proposal, target_probs)

    def _accept(self, view: View) -> Tensor:
        return (view.drafted & self.passes(view.p[:, :-1], view.proposal.tokens)).to(view.p.dtype)

    def _residual(self, view: View, num_accepted: Tensor) -> Tensor:
        return likeliest(row_within(view.p, num_accepted))


@dataclass(frozen=True)
class _Tested:
    """See `Judgement`."""

    passed: Tensor
    p: Tensor

    def accept(self) -> Tensor:
        return self.passed

    def residual(self, place: Tensor) -> Tensor:
        return likeliest(row_within(self.p, place))

    def carry(self, place: Tensor, next_token: Tensor) -> list[Any]:
        return [None] * len(place)


def likeliest(rows: Tensor) -> Tensor:
    """[B, V]: all on the likeliest token of each row, of equal ones on the first."""
    ids = torch.arange(rows.shape[-1], device=rows.device)
    top = rows == rows.amax(-1, keepdim=True)
    first = torch.where(top, ids, len(ids)).amin(-1)
    return one_hot(first, len(ids)).to(rows.dtype)


def ranks(rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """[B, N] the rank of each token in its row [B, N, V], from 1, and its probability; of equally
    likely tokens the first one comes first."""
    own = rows.gather(-1, tokens[..., None])
    ids = torch.arange(rows.shape[-1], device=rows.device)
    before = (rows > own) | ((rows == own) & (ids < tokens[..., None]))
    return 1 + before.sum(-1), own[..., 0]
