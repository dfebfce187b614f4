"""How other engines choose draft sizes, in simulated services, to compare with."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.sizes.goodput import PLAIN
from tandem.peers.text.contracts import DraftReply, SizeChoice, SizePolicy, VerdictReply
from tandem.profile import Profile
from tandem.speculation.tree import DraftSize
from tests.support.simulated_services import SimulatedServices


class Steps:
    """The schedule of `transformers` (`num_assistant_tokens_schedule="heuristic"`): two tokens more
    if all were kept, one fewer if not."""

    begins_drafting = True

    def __init__(self, longest: int) -> None:
        self._gamma, self._longest = 5.0, longest

    def choose(self, left: int) -> SizeChoice:
        return SizeChoice(DraftSize(min(int(self._gamma), left - 1)))

    def observe(self, drafted: DraftReply | None, decided: VerdictReply) -> None:
        if drafted is not None:
            more = 2 if decided.num_accepted == drafted.gamma else -1
            self._gamma = min(max(self._gamma + more, 1), self._longest)

    def end(self) -> None:
        pass


class ByProfile:
    """TurboSpec (arXiv 2406.14066): the goodput by a profile that was measured before, and a moving
    average of the share of kept tokens; no drafts are an option."""

    begins_drafting = True

    def __init__(self, world: SimulatedServices, offered: Sequence[DraftSize]) -> None:
        self._world, self._offered = world, offered
        self._verify, self._draft = map(Profile, world.profiles())
        self._share, self._plain = 0.7, 0

    def choose(self, left: int) -> SizeChoice:
        texts = self._world.active

        def goodput(size: DraftSize) -> float:
            tokens = sum(self._share**depth for depth in range(size.gamma + 1))
            verify = self._verify.at(texts, size.gamma + 1)
            return tokens / (verify + size.gamma * self._draft.at(texts, 1))

        size = max(self._offered, key=goodput)
        self._plain = 0 if size.gamma else self._plain + 1
        # Else it would never see whether the drafter is good again.
        if self._plain == 64:
            size, self._plain = DraftSize(1), 0
        return SizeChoice(size if size.gamma < left else PLAIN)

    def observe(self, drafted: DraftReply | None, decided: VerdictReply) -> None:
        if drafted is not None and drafted.gamma:
            tried = min(decided.num_accepted + 1, drafted.gamma)
            for at in range(tried):
                self._share += (float(at < decided.num_accepted) - self._share) * 0.05

    def end(self) -> None:
        pass


class WithSteps(SimulatedServices):
    """Texts by `Steps`."""

    def begin(self, offered: Sequence[DraftSize]) -> SizePolicy:
        return Steps(self.max_gamma)


class WithProfile(SimulatedServices):
    """Texts by `ByProfile`."""

    def begin(self, offered: Sequence[DraftSize]) -> SizePolicy:
        return ByProfile(self, offered)
