"""How far a drafter's rows are from its target's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# By how much less a deeper token of a head counts: λ of Medusa (arXiv 2401.10774, equation 1).
_DEEPER = 0.8
# Of what a row of some tokens leaves to all others: less than float32 tells.
_LEAST_REST = 1e-7

Divergence = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What a target says of the token at each place.

    Attributes:
        log_probs: [rows, time, k] natural logarithms, float32.
        ids: [rows, time, k] whose they are; None where they are the whole vocabulary's.
    """

    log_probs: Tensor
    ids: Tensor | None = None

    def __getitem__(self, rows: slice | list[int]) -> TargetRows:
        ids = None if self.ids is None else self.ids[rows]
        return TargetRows(self.log_probs[rows], ids)

    def to(self, device: torch.device) -> TargetRows:
        """The same on a device."""
        ids = None if self.ids is None else self.ids.to(device)
        return TargetRows(self.log_probs.to(device), ids)

    def beside(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The target's and the drafter's logarithms over the same outcomes [rows, time, n]: the
        vocabulary, or the tokens of each row and all others together.

        With all others together each divergence is a lower bound of the true one.

        Args:
            logits: [rows, time, vocabulary] of the drafter.
        """
        if self.ids is None:
            known = min(logits.shape[-1], self.log_probs.shape[-1])
            ours = logits[..., :known].float().log_softmax(-1)
            return self.log_probs[..., :known].log_softmax(-1), ours
        # An id that the drafter does not know is one of all others.
        unknown = self.ids >= logits.shape[-1]
        ours = logits.float().log_softmax(-1).gather(-1, self.ids.masked_fill(unknown, 0))
        theirs, ours = (
            each.masked_fill(unknown, math.log(_LEAST_REST)) for each in (self.log_probs, ours)
        )
        return _with_rest(theirs), _with_rest(ours)


def _with_rest(log_probs: Tensor) -> Tensor:
    rest = 1 - log_probs.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, rest.clamp(min=_LEAST_REST).log()], -1)


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) [...] of logarithms [..., n] over the same outcomes."""
    return (p.exp() * (p - q)).sum(-1)


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(q ‖ p) [...]."""
    return forward_kl(q, p)


def jsd(p: Tensor, q: Tensor) -> Tensor:
    """The Jensen-Shannon divergence [...], with equal weights."""
    mean = torch.logaddexp(p, q) - math.log(2)
    return (forward_kl(p, mean) + forward_kl(q, mean)) / 2


def tvd(p: Tensor, q: Tensor) -> Tensor:
    """The total variation distance [...]: the probability that a drafted token is rejected."""
    return 1 - torch.minimum(p.exp(), q.exp()).sum(-1)


_BY_NAME: dict[str, Divergence] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "jsd": jsd,
    "tvd": tvd,
}


def loss(name: str, logits: Tensor, rows: TargetRows | None, following: Tensor) -> Tensor:
    """The loss at each place [rows, time], in nats, or as a probability (tvd).

    Args:
        name: of the divergence; "cross-entropy" is that of the tokens, whatever the target says.
        logits: [rows, time, vocabulary] of the drafter.
        rows: the target's; unused with cross-entropy.
        following: [rows, time] the next token at each place.
    """
    if rows is None or name == "cross-entropy":
        return F.cross_entropy(logits.float().transpose(1, 2), following, reduction="none")
    return _BY_NAME[name](*rows.beside(logits))


def discounted(losses: Sequence[Tensor]) -> Tensor:
    """Σ λ^(k - 1) ℓ_k of the losses of a head's depths, from 1 on; λ = 0.8."""
    return torch.stack([_DEEPER**depth * each for depth, each in enumerate(losses)]).sum()
