"""Which policy chooses a text's draft sizes; each is one file of this folder.

| a request that | is drafted by |
| --- | --- |
| says its size, by itself or by the settings | `FixedSize`: a seed repeats its text |
| leaves it open | `AdaptiveSize`: what drafts earn, learnt by all texts of a pair together |
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.sizes.adaptive import AdaptiveSize
from orchestrator.sizes.fixed import FixedSize
from orchestrator.sizes.shared import Adaptation
from orchestrator.text.contracts import SizePolicy
from orchestrator.text.values import Generation


class SizePolicies:
    """Makes each text's policy, and keeps what the texts of a pair learn.

    Args:
        active: how many texts are being made.
    """

    def __init__(self, active: Callable[[], int]) -> None:
        self._active = active
        self._pair: object = None
        self._adaptation: Adaptation | None = None

    def policy_for(self, generation: Generation, pair: object) -> SizePolicy:
        """The policy of a text.

        Args:
            generation: the validated request.
            pair: the target's law and the drafter's; another pair is learnt anew.
        """
        if len(generation.sizes) == 1:
            (size,) = generation.sizes
            return FixedSize(size.gamma, size.nodes, generation.rule.fixed_gamma)
        if self._adaptation is None or self._pair != pair:
            self._pair, self._adaptation = pair, Adaptation(self._active)
        return AdaptiveSize(self._adaptation, generation.sizes)
