"""The output of a pass: rows of logits, and hidden states where some are wanted."""

from __future__ import annotations

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

    def without(self, token_ids: Tensor | None) -> PassOutput:
        """The same, whose rows never give some ids; in place.

        Args:
            token_ids: [n] int64; None for none.
        """
        if token_ids is not None:
            with torch.inference_mode():
                self.logits.index_fill_(1, token_ids, -torch.inf)
        return self
