"""Which policy chooses a text's draft sizes; each is one file of this folder.

| a request that | is drafted by |
| --- | --- |
| says its size, by itself or by the settings | `FixedSize`: a seed repeats its text |
| leaves it open | `AdaptiveSize`: what drafts earn, learnt by all texts of a pair together |

`PreparedSize` adds to either whether drafts are prepared, where drafters can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.sizes.adaptive import Adaptation, AdaptiveSize
from orchestrator.sizes.ahead import AheadChoice, PreparedSize
from orchestrator.sizes.fixed import FixedSize
from tandem.peers.text.contracts import AheadWay, SizePolicy
from tandem.peers.text.values import Generation
from tandem.profile import PassTime, Profile

_WAYS = {
    "auto": None,
    "off": AheadWay.NOTHING,
    "held": AheadWay.HELD,
    "sent": AheadWay.SENT,
}


_PassTimes = tuple[Sequence[PassTime], Sequence[PassTime]]
# Replicas' times differ by as much: texts go on learning together.
_ALIKE = 1.25


class SizePolicies:
    """Makes each text's policy, and keeps what the texts of a pair learn.

    Args:
        active: how many texts a target has.
        ahead: how drafts are prepared: "off", "held" or "sent"; "auto" chooses.
    """

    def __init__(self, active: Callable[[], int], ahead: str = "auto") -> None:
        self._active = active
        self._only = _WAYS[ahead]
        self._pair: object = None
        self._adaptation: Adaptation | None = None
        self._pass_times: _PassTimes = ((), ())  # that the pair's texts learn with
        self._ahead = AheadChoice(active, self._only)

    def policy_for(
        self,
        generation: Generation,
        pair: object,
        verify: Sequence[PassTime] = (),
        draft: Sequence[PassTime] = (),
        *,
        prepares: bool = False,
    ) -> SizePolicy:
        """The policy of a text.

        Args:
            generation: the validated request.
            pair: the target's law and the drafter's; another pair is learnt from the beginning.
            verify: what the target's passes take.
            draft: what the drafter's passes take.
            prepares: drafters can prepare drafts.
        """
        if self._pair != pair:
            self._pair = pair
            self._adaptation, self._ahead = None, AheadChoice(self._active, self._only)
        policy = self._of(generation, verify, draft)
        return PreparedSize(policy, self._ahead) if prepares else policy

    def _of(
        self, generation: Generation, verify: Sequence[PassTime], draft: Sequence[PassTime]
    ) -> SizePolicy:
        if len(generation.sizes) == 1:
            (size,) = generation.sizes
            return FixedSize(size.gamma, size.nodes, generation.rule.needs_every_draft)
        if self._adaptation is None:
            self._adaptation = Adaptation(self._active, Profile(verify), Profile(draft))
        elif not _alike(self._pass_times, (verify, draft)):  # another back end computes them
            self._adaptation.renew_times(Profile(verify), Profile(draft))
            self._ahead = AheadChoice(self._active, self._only)
        else:
            verify, draft = self._pass_times
        self._pass_times = verify, draft
        return AdaptiveSize(self._adaptation, generation.sizes)


def _alike(one: _PassTimes, other: _PassTimes) -> bool:
    """Whether the same passes are measured, and take about as long."""
    for before, now in zip(one, other, strict=True):
        known = {passes[:2]: passes[2] for passes in before}
        if known.keys() != {passes[:2] for passes in now}:
            return False
        if any(not known[p[:2]] / _ALIKE <= p[2] <= known[p[:2]] * _ALIKE for p in now):
            return False
    return True
