"""Has all ways to decode write the same texts in turn, so that only one computes at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.peers.plan import Plan
from benchmarks.peers.protocol import Generate
from benchmarks.peers.roster import Roster, Say
from benchmarks.peers.spread import best_gammas
from benchmarks.peers.way import Job, Measurement, Way

Found = dict[Job, dict[Way, list[Measurement]]]
Choices = dict[Job, dict[str, int]]
"""The best draft length of each family, by job."""

_WARM_TOKENS = 24
# First seeds of turns that choose, of measured turns, and of samples without and with drafts.
_CHOOSING_SEED, _MEASURED_SEED = 1_000_000, 0
_PLAIN_SEED, _DRAFTED_SEED = 2_000_000, 3_000_000
_CHUNK = 50


def jobs_of(plan: Plan) -> list[Job]:
    """All jobs of a plan, temperature by temperature."""
    return [Job(t, texts, tokens) for t in plan.temperatures for texts, tokens in plan.loads]


class Turns:
    """Runs turns on a roster.

    Args:
        roster: whose engines write.
        prompts: token ids of the prompts.
        say: is called with what comes next.
        between: is called before each turn, for further measurements.
    """

    def __init__(
        self,
        roster: Roster,
        prompts: Sequence[tuple[int, ...]],
        say: Say,
        between: Callable[[], object] = lambda: None,
    ) -> None:
        self._roster = roster
        self._prompts = prompts
        self._say = say
        self._between = between

    def warm_up(self, jobs: Sequence[Job]) -> None:
        """Run every way once for every job, with short texts."""
        for job in jobs:
            short = Job(job.temperature, job.texts, min(job.new_tokens, _WARM_TOKENS))
            self._say(f"warming up: {short}")
            for way in self._roster.ways(job.texts):
                self._roster.generate(way, self._ask(short, way, 0, 0))

    def choose(self, plan: Plan, jobs: Sequence[Job], budget_s: float) -> tuple[Found, Choices]:
        """The texts to choose by, and each family's best draft length for each job."""
        drafted = {job: [w for w in self._roster.ways(job.texts) if w.gamma] for job in jobs}
        if len(plan.gammas) == 1:
            return {}, {job: {way.family: way.gamma for way in drafted[job]} for job in jobs}
        found = self.write("choosing", drafted, plan.choosing_turns, budget_s, _CHOOSING_SEED)
        return found, {job: best_gammas(speeds(found[job])) for job in jobs}

    def measure(self, plan: Plan, choices: Choices, budget_s: float) -> Found:
        """Measure every engine without drafts, and every family at its best draft length."""
        ways = {
            job: [
                way
                for way in self._roster.ways(job.texts)
                if way.gamma in (0, best.get(way.family))
            ]
            for job, best in choices.items()
        }
        return self.write("measuring", ways, plan.turns, budget_s, _MEASURED_SEED)

    def write(
        self,
        what: str,
        ways: Mapping[Job, Sequence[Way]],
        turns: int,
        budget_s: float,
        first_seed: int = _CHOOSING_SEED,
    ) -> Found:
        """Run the ways of each job, turn by turn.

        Args:
            what: name of this phase, for progress.
            ways: that write, by job.
            turns: most turns.
            budget_s: a further turn starts only if it is likely to end within this time.
            first_seed: of the first turn's texts.
        """
        found: Found = {job: {way: [] for way in own} for job, own in ways.items()}
        started = time.perf_counter()
        for turn in range(turns):
            spent = time.perf_counter() - started
            if turn and spent * (turn + 1) / turn > budget_s:
                break
            self._between()
            for job, own in ways.items():
                self._say(f"{what}, turn {turn + 1} of at most {turns}: {job}")
                # The first way of a turn is another each time.
                shift = turn % max(len(own), 1)
                for way in (*own[shift:], *own[:shift]):
                    ask = self._ask(job, way, turn, first_seed)
                    if (written := self._roster.generate(way, ask, turn)) is not None:
                        found[job][way].append(written)
        return {job: {w: ms for w, ms in own.items() if ms} for job, own in found.items()}

    def _ask(self, job: Job, way: Way, turn: int, first_seed: int) -> Generate:
        numbers = range(turn, turn + job.texts)
        return Generate(
            prompts=tuple(self._prompts[n % len(self._prompts)] for n in numbers),
            seeds=tuple(first_seed + turn * job.texts + n for n in range(job.texts)),
            gamma=way.gamma,
            temperature=job.temperature,
            new_tokens=job.new_tokens,
            rule=way.rule,
        )

    def sample(
        self, plan: Plan, gammas: Mapping[str, int], budget_s: float
    ) -> dict[str, dict[int, list[tuple[int, ...]]]]:
        """Short texts of each engine at temperature 1, by draft length, with seeds of their own.

        Args:
            plan: number and length of the texts.
            gammas: the draft length of each engine, in the order in which they write.
            budget_s: for all engines; time that one leaves over goes to the next ones.
        """
        ends = time.perf_counter() + budget_s
        samples: dict[str, dict[int, list[tuple[int, ...]]]] = {}
        for number, (engine, gamma) in enumerate(gammas.items()):
            own: dict[int, list[tuple[int, ...]]] = {0: [], gamma: []}
            now = time.perf_counter()
            stop = now + max(0.0, ends - now) / (len(gammas) - number)
            while self._sample_more(Way(engine, gamma), own, plan):
                self._say(f"law of {engine}: {len(own[0])} + {len(own[gamma])} texts")
                if time.perf_counter() > stop:
                    break
            samples[engine] = own
        return samples

    def _sample_more(self, drafted: Way, own: dict[int, list[tuple[int, ...]]], plan: Plan) -> bool:
        """Add a chunk to each sample; returns whether there is more to come."""
        for gamma, first in ((0, _PLAIN_SEED), (drafted.gamma, _DRAFTED_SEED)):
            have = len(own[gamma])
            count = min(_CHUNK, plan.law_texts - have)
            if count <= 0:
                return False
            seeds = tuple(range(first + have, first + have + count))
            prompts = (self._prompts[0],) * count
            ask = Generate(prompts, seeds, gamma, 1.0, plan.law_tokens)
            written = self._roster.generate(Way(drafted.engine, gamma), ask)
            if written is None:
                return False
            own[gamma] += written.texts
        return True


def speeds(ways: Mapping[Way, Sequence[Measurement]]) -> dict[Way, dict[int, float]]:
    """Tokens a second by turn."""
    return {way: {m.turn: m.tokens_per_s for m in own} for way, own in ways.items()}
