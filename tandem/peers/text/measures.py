"""A text in numbers: where its wall time went, and what was drafted, kept and emitted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.telemetry.stages import ENGINE_STAGES, GATHER, QUEUE, StageClock, StageTimes, busy_of

# Built once: each round of each text is booked by them.
_BUSY_OF = {
    step: [(busy_of(step, stage), stage) for stage in ENGINE_STAGES] for step in ("draft", "verify")
}


@dataclass(slots=True)
class TextCounts:
    """What was drafted, kept and emitted.

    Attributes:
        new_tokens: emitted.
        gammas: each round's draft length, the prefill (0) first.
        nodes: tokens that each round drafted.
        accepted: each round's number of kept tokens.
        accepted_per_rank: how often a kept token was the first of its siblings, the second, ...
        overlap_sum: Σ min(p, q) over drafted positions whose context was emitted.
        overlap_positions: how many those are.
        draft_bytes: size of the drafts' distributions.
        feedback_bytes: size of the hidden states and predictions that came for the drafter.
        undrafted_rounds: for which a draft was wanted, and none came.
        cached_tokens: that the first target and the first drafter had computed when the text
            began there, by role.
        given_back: how often its target needed its memory for older texts.
        weights_version: of the last drafter that opened the text, see `ModelInfo`; 0 without one.
    """

    new_tokens: int = 0
    gammas: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    accepted_per_rank: list[int] = field(default_factory=list)
    overlap_sum: float = 0.0
    overlap_positions: int = 0
    draft_bytes: int = 0
    feedback_bytes: int = 0
    undrafted_rounds: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)
    given_back: int = 0
    weights_version: int = 0

    def add_round(
        self, gamma: int, nodes: int, ranks: Sequence[int], overlaps: Sequence[float]
    ) -> None:
        """Count one round.

        Args:
            gamma: length of its draft.
            nodes: tokens of it.
            ranks: of the kept ones among their siblings.
            overlaps: of what was drafted in a context that was emitted.
        """
        self.gammas.append(gamma)
        self.nodes.append(nodes)
        self.accepted.append(len(ranks))
        for rank in ranks:
            missing = rank + 1 - len(self.accepted_per_rank)
            self.accepted_per_rank += [0] * missing
            self.accepted_per_rank[rank] += 1
        self.overlap_sum += sum(overlaps)
        self.overlap_positions += len(overlaps)

    @property
    def drafted_tokens(self) -> int:
        """Tokens drafted."""
        return sum(self.nodes)

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens kept."""
        return sum(self.accepted)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0 without a draft."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def block_efficiency(self) -> float:
        """Mean of accepted + 1 over drafted rounds; 0 without one."""
        drafted = [a + 1 for g, a in zip(self.gammas, self.accepted, strict=True) if g]
        return sum(drafted) / len(drafted) if drafted else 0.0

    @property
    def accepted_per_position(self) -> list[int]:
        """How often the token at each place of a draft was kept."""
        places = range(max(self.gammas, default=0))
        return [sum(a > place for a in self.accepted) for place in places]


class TextTimes(StageClock):
    """A request's clock, and the times that its services report.

    Attributes:
        busy_ns: what the services did meanwhile, by name.
        round_wall_ns: each drafted round, from asking for the draft to the verdict.
        round_model_ns: the two forward passes of those rounds.
        first_token_ns: from the start to the first round's message; 0 until then.
        drafted_tokens: of all drafts, decided or not.
        prefill_tokens: tokens that a target drew from its prefill.
    """

    def __init__(self) -> None:
        super().__init__()
        self.busy_ns: dict[str, int] = {}
        self.round_wall_ns: list[int] = []
        self.round_model_ns: list[int] = []
        self.first_token_ns = 0
        self.drafted_tokens = 0
        self.prefill_tokens = 0
        self._round_started_ns = 0

    def add_prefill(self, role: str, times: StageTimes) -> None:
        """Book an opening."""
        self._add(f"{role}_prefill", times.forward_ns)
        # A first token waits for the target alone.
        if role == "target":
            self.prefill_tokens += 1
            for stage in (QUEUE, GATHER):
                self._add(f"{role}_prefill_{stage}", times.of(stage))

    def start_round(self) -> None:
        """A draft is asked for."""
        self._round_started_ns = time.perf_counter_ns()

    def add_decided(self, verify: StageTimes, draft: StageTimes | None) -> None:
        """Book a round's verdict, and its draft if it had one."""
        self._add_step("verify", verify)
        if draft is None:
            return
        self._add_step("draft", draft)
        self.round_wall_ns.append(time.perf_counter_ns() - self._round_started_ns)
        self.round_model_ns.append(draft.forward_ns + verify.forward_ns)

    def stages_ns(self) -> dict[str, int]:
        """Time in each stage so far; they sum to the text's wall time."""
        self.switch(self._stage)
        return dict(self._spent)

    def _add_step(self, step: str, times: StageTimes) -> None:
        for name, stage in _BUSY_OF[step]:
            self._add(name, times.of(stage))

    def _add(self, name: str, nanoseconds: int) -> None:
        self.busy_ns[name] = self.busy_ns.get(name, 0) + nanoseconds
