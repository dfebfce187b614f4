"""Simulated services for policies that choose draft sizes: only times and random tokens."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.sizes.adaptive import Adaptation, AdaptiveSize
from orchestrator.sizes.goodput import PLAIN, sizes
from tandem.peers.text.contracts import DraftReply, SizePolicy, VerdictReply
from tandem.profile import Profile
from tandem.speculation.tree import DraftSize
from tandem.telemetry.stages import StageTimes

MS = 1_000_000
# What services may be like, in terms of `SimulatedServices`.
WORLDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "cheap drafts": {"draft_ms": 0.25},
    "dear drafts": {"draft_ms": 3.0},
    "a good drafter": {"acceptance": 0.9},
    "a middling one": {"acceptance": 0.4, "draft_ms": 2.0},
    "a bad one": {"acceptance": 0.05},
    # Who drafts has others wait: texts that are fastest without, all of them together.
    "a crowd": {"draft_ms": 1.2, "verify_ms": 2.5, "hop_ms": 0.4, "crowd": 0.15},
    "a mild crowd": {"draft_ms": 0.8, "verify_ms": 4.0, "hop_ms": 0.4, "crowd": 0.05},
    "slow spells": {"slower": 2.0},
    "slow openings": {"opening": 10, "reading_ms": 10.0},
    "those of a bad drafter": {"acceptance": 0.1, "opening": 10, "reading_ms": 10.0},
    "noisy times": {"noise": 0.3},
    "dear rows": {"row_ms": 0.5},
    "nearly a tie": {"acceptance": 0.3, "draft_ms": 1.0},
    "long drafts": {"max_gamma": 16, "acceptance": 0.95},
}


@dataclass
class SimulatedServices:
    """Rounds of several texts at once, whose times and tokens follow given laws.

    Attributes:
        draft_ms: time of a drafter's pass.
        verify_ms: time of a target's pass with one row.
        row_ms: added to the target's pass by each further row of any text.
        hop_ms: overhead of each message, outside the models.
        acceptance: of each drafted token.
        crowd: share by which each other text that drafts makes a round longer.
        opening: rounds that a text waits for a drafter if it did not begin with one.
        reading_ms: extra time of a drafter that was not asked in the round before.
        noise: of a round's time, as a share.
        max_gamma: of the pair.
        profiled: what the services measured at their start, over what is true; 0 for nothing.
        rows_profiled: the same of what further rows take.
        slower: factor by which everything is slower during slow spells.
        spell_ms: mean length of a slow spell, and of the time between two.
    """

    draft_ms: float = 0.5
    verify_ms: float = 8.0
    row_ms: float = 0.1
    hop_ms: float = 1.0
    acceptance: float = 0.74
    crowd: float = 0.0
    opening: int = 0
    reading_ms: float = 0.0
    noise: float = 0.1
    max_gamma: int = 8
    profiled: float = 1.0
    rows_profiled: float = 1.0
    slower: float = 1.0
    spell_ms: float = 500.0
    seed: int = 0
    now: int = 0
    tokens: float = 0.0
    chosen: list[DraftSize] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.active = 1
        verify, draft = map(Profile, self.profiles())
        self.all = Adaptation(lambda: self.active, verify, draft, lambda: self.now)
        self._recent: dict[int, DraftSize] = {}
        self._pace, self._pace_until = 1.0, 0
        self.busy = 0.0

    def profiles(self) -> Iterator[list[tuple[int, int, float]]]:
        """What the services measure at their start, the target first."""
        if not self.profiled:
            yield from ([], [])
            return
        shapes = [(texts, rows) for texts in (1, 4, 16) for rows in (1, 5, 17)]
        row = self.row_ms * self.rows_profiled
        passes = ((t, r, self.verify_ms + (t * r - 1) * row) for t, r in shapes)
        yield [(t, r, ms * MS * self.profiled) for t, r, ms in passes]
        yield [(t, r, self.draft_ms * MS * self.profiled) for t, r in shapes]

    def wall_ms(self, size: DraftSize, others: Sequence[DraftSize] = ()) -> float:
        """Time of a round, if the target's pass also has the rows of the other drafts."""
        drafting = self.hop_ms + size.gamma * self.draft_ms if size.gamma else 0.0
        beside = self.crowd * sum(other.gamma > 0 for other in others)
        return (drafting + self.hop_ms + self.pass_ms(size, others)) * (1 + beside)

    def pass_ms(self, size: DraftSize, others: Sequence[DraftSize] = ()) -> float:
        """Time of the target's pass alone."""
        rows = size.gamma + sum(1 + other.gamma for other in others)
        return self.verify_ms + rows * self.row_ms

    def best(self, texts: int = 1) -> float:
        """Tokens a millisecond of a text with the best fixed size, if all texts use it."""
        return max(self.speed(DraftSize(gamma), texts) for gamma in range(self.max_gamma + 1))

    def speed(self, size: DraftSize, texts: int = 1) -> float:
        """Tokens a millisecond of a text with a given size, if all texts use it."""
        tokens = sum(self.acceptance**depth for depth in range(size.gamma + 1))
        return tokens / self.wall_ms(size, [size] * (texts - 1))

    def run(
        self,
        rounds: int,
        texts: int = 1,
        length: int = 10**9,
        each: Callable[[], None] | None = None,
    ) -> float:
        """Run texts for a number of rounds; returns tokens a millisecond of a text, by the time
        without slow spells.

        Args:
            rounds: of all texts together.
            texts: at once.
            length: rounds of a text, after which another begins.
            each: called before each round.
        """
        self.active = texts
        began, before = self.busy, self.tokens
        offered = sizes(self.max_gamma, 0, None, None)
        policies = [self.begin(offered) for _ in range(texts)]
        waits = [self._wait(policy) for policy in policies]
        drew = [False] * texts
        made = [0] * texts
        ready = [(self.now, text) for text in range(texts)]
        for _ in range(rounds):
            if each is not None:
                each()
            self.now, text = heapq.heappop(ready)
            if pending := self._recent.pop(text, None):
                policies[text].observe(*self._outcome(pending, list(self._recent.values())))
                made[text] += 1
                if made[text] == length:
                    policies[text].end()
                    policies[text], made[text] = self.begin(offered), 0
                    waits[text] = self._wait(policies[text])
            size = policies[text].choose(1000).size
            self.chosen.append(size)
            if size.gamma and waits[text]:
                size, waits[text] = PLAIN, waits[text] - 1
            self._recent[text] = size
            others = [other for at, other in self._recent.items() if at != text]
            wall = self.wall_ms(size, others)
            if size.gamma and not drew[text]:
                wall += self.reading_ms
            drew[text] = size.gamma > 0
            self.busy += wall
            wall *= self._now() * self._random.lognormvariate(-(self.noise**2) / 2, self.noise)
            heapq.heappush(ready, (self.now + int(wall * MS), text))
        self._recent.clear()
        for policy in policies:
            policy.end()
        return (self.tokens - before) / max(self.busy - began, 1e-9)

    def begin(self, offered: Sequence[DraftSize]) -> SizePolicy:
        """The policy of a text."""
        return AdaptiveSize(self.all, offered)

    def _wait(self, policy: SizePolicy) -> int:
        """Rounds of a text in which it wants a draft and its drafter is not ready."""
        return 0 if policy.begins_drafting else self.opening

    def _now(self) -> float:
        """The factor by which everything is slower at the moment."""
        if self.now >= self._pace_until:
            self._pace = 1.0 if self._pace > 1 else self.slower
            self._pace_until = self.now + int(self._random.expovariate(1 / self.spell_ms) * MS)
        return self._pace

    def _outcome(
        self, size: DraftSize, others: Sequence[DraftSize]
    ) -> tuple[DraftReply | None, VerdictReply]:
        gamma, kept = size.gamma, 0
        while kept < gamma and self._random.random() < self.acceptance:
            kept += 1
        # The expected tokens are counted, so that results do not depend on luck.
        self.tokens += sum(self.acceptance**depth for depth in range(gamma + 1))
        draft_ns, verify_ns = (
            int(ms * MS) for ms in (gamma * self.draft_ms, self.pass_ms(size, others))
        )
        overlaps = [
            min(max(self._random.gauss(self.acceptance, 0.25), 0.0), 1.0) for _ in range(gamma)
        ]
        verdict = VerdictReply(
            kept, kept, 0, overlaps, StageTimes(forward_ns=verify_ns, batch_size=1 + len(others))
        )
        if not gamma:
            return None, verdict
        return DraftReply(
            [0] * gamma, None, None, 0, StageTimes(forward_ns=draft_ns, batch_size=1 + len(others))
        ), verdict
