"""How long a round takes: by the services' profiles, corrected by the rounds that happen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.peers.text.contracts import DraftReply, VerdictReply
from tandem.profile import Profile
from tandem.speculation.prepared_outcome import PreparedOutcome
from tandem.speculation.tree import DraftSize

# Rounds that a mean looks back on: it follows a service that became slower within seconds.
_MEMORY = 32
# A round that takes longer than this factor times what is expected met something else: a start, a
# compiler, a client's prompt.
_OUTLIER = 2.5
# The estimate of the kind of rounds that is not in use, plain or drafted, decays over `SLOW` rounds
# of each text, each time by a share of one round's time. If it decays too far, `_FEW` rounds
# correct it, at about 1 % of the time.
SLOW, _FEW = 512, 2


@dataclass(slots=True)
class Mean:
    """A running mean over the last `memory` observations, of which there were `count`."""

    value: float = 0.0
    count: float = 0.0
    memory: float = _MEMORY

    def add(self, observed: float, weight: float = 1.0) -> None:
        """Take an observation in, which counts for as much."""
        self.count = min(self.count + weight, self.memory)
        self.value += (observed - self.value) * weight / self.count

    def add_share(self, observed: float, weight: float) -> None:
        """The same of what is never far beyond its mean."""
        if self.count >= _FEW and self.value > 0:
            observed = min(observed, _OUTLIER * self.value)
        self.add(observed, weight)

    def fade(self, towards: float, share: float, most: float = math.inf) -> None:
        """Give up a share of what is known, at most so much; a few new rounds then say more."""
        self.value -= min((self.value - towards) * share, most)
        self.count = min(self.count, _FEW)


class RoundTimes:
    """A round is the target's pass, the drafter's passes, and the rest: messages, and waiting.

    Factors correct the passes. The rest is known for each load. Plain and drafted rounds are known
    apart from each other: what a profile does not know of many rows says nothing of one row. A
    draft that was prepared while the target verified takes what exceeds that time.

    Args:
        verify: the target's profile.
        draft: the drafter's.
    """

    def __init__(self, verify: Profile, draft: Profile) -> None:
        self._verify, self._draft = verify, draft
        self._verify_factors = Mean(1.0), Mean(1.0)  # of plain rounds, and of drafted ones
        self._draft_factor = Mean(float(draft.known))  # without a model nothing is measured
        self._rest: dict[tuple[bool, int], Mean] = {}
        self._ready: dict[int, Mean] = {}  # share of drafts that were, by load

    def wall(self, size: DraftSize, texts: int) -> float:
        """Nanoseconds of a round, where a number of texts have rounds of this size."""
        passes = self._passes(size, texts)
        return max(passes + self._rest_of(size.gamma > 0, load_of(texts)), passes / 2, 1.0)

    def add(
        self,
        size: DraftSize,
        texts: int,
        wall_ns: float,
        drafted: DraftReply | None,
        decided: VerdictReply,
        weight: float = 1.0,
    ) -> bool:
        """Take a round in.

        Args:
            size: of its draft.
            texts: that had rounds of its kind, plain or drafted.
            wall_ns: that it took.
            drafted: its draft.
            decided: its verdict.
            weight: in rounds of each text.

        Returns:
            Whether enough such rounds are known to act on.
        """
        kind, load, verify = size.gamma > 0, load_of(texts), decided.times
        took = verify.forward_ns + verify.numbers_ns
        factor = self._verify_factors[kind]
        factor.add_share(took / self._verify.at(verify.batch_size, _rows(size)), weight)
        if drafted is not None and kind:
            self._ready.setdefault(load, Mean()).add(
                drafted.prepared is PreparedOutcome.HIT, weight
            )
        if drafted is not None and kind and drafted.prepared in (None, PreparedOutcome.MISS):
            draft = drafted.times
            took = draft.forward_ns + draft.numbers_ns
            self._draft_factor.add_share(took / self._drafting(size, draft.batch_size), weight)
        rest = self._rest.setdefault((kind, load), Mean())
        passes = self._passes(size, texts)
        if rest.count > _FEW:
            wall_ns = min(wall_ns, _OUTLIER * (passes + max(rest.value, 0.0)))
        rest.add(wall_ns - passes, weight)
        share = weight / SLOW
        if other := self._nearest(not kind, load):
            other.fade(self._least_rest(not kind, load), share, share * wall_ns)
        self._verify_factors[not kind].fade(factor.value, share)
        if not kind:
            self._draft_factor.fade(float(self._draft.known), share)
        return rest.count > _FEW

    def _passes(self, size: DraftSize, texts: int) -> float:
        plain, drafted = self._verify_factors
        factor = drafted if drafted.count and (size.gamma or not plain.count) else plain
        verifying = factor.value * self._verify.at(texts, _rows(size))
        if not size.gamma:
            return verifying
        drafting = self._draft_factor.value * self._drafting(size, texts)
        ready = self._ready.get(load_of(texts))
        hidden = 0.0 if ready is None else ready.value * min(drafting, verifying)
        return verifying + drafting - hidden

    def _drafting(self, size: DraftSize, texts: int) -> float:
        return size.gamma * self._draft.at(texts, max(size.nodes / size.gamma, 1.0))

    def _rest_of(self, drafted: bool, load: int) -> float:
        known = self._nearest(drafted, load)
        return self._least_rest(drafted, load) if known is None else known.value

    def _nearest(self, drafted: bool, load: int) -> Mean | None:
        """What is known of the nearest load."""
        known = [at for kind, at in self._rest if kind == drafted]
        near = min(known, key=lambda at: abs(at - load), default=None)
        return None if near is None else self._rest[drafted, near]

    def _least_rest(self, drafted: bool, load: int) -> float:
        """To hope for: of plain rounds nothing; of drafted ones a plain round's messages."""
        plain = self._rest.get((False, load))
        return max(plain.value, 0.0) if drafted and plain else 0.0


def _rows(size: DraftSize) -> int:
    return 1 + max(size.nodes, size.gamma)


def load_of(texts: int) -> int:
    """In powers of two: 0 for one text, 1 for two, 2 for three or four."""
    return (texts - 1).bit_length()
