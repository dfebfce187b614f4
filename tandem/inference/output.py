"""The output of a pass: rows of logits, and hidden states where some are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PassOutput:
    """What a pass gives.

    Attributes:
        logits: [R, V], of the rows asked for, feed by feed.
        states: [S, layers, width], hidden states of the rows whose states were asked for, feed by
            feed; None where none were.
    """

    logits: Tensor
    states: Tensor | None = None

    def first(self, count: int) -> PassOutput:
        """The first so many rows of both."""
        return self._part(slice(count))

    def row(self, place: int) -> PassOutput:
        """One row of both."""
        return self._part(slice(place, place + 1))

    def _part(self, part: slice) -> PassOutput:
        return PassOutput(self.logits[part], None if self.states is None else self.states[part])


def joined(outputs: Sequence[PassOutput]) -> PassOutput:
    """The rows of all, which have states or have none."""
    states = [each.states for each in outputs if each.states is not None]
    return PassOutput(
        torch.cat([each.logits for each in outputs]), torch.cat(states) if states else None
    )
