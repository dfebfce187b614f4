"""Where a text's wall time went, and what its services did meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from orchestrator.text.contracts import Decided, Drafted, Drafter, DraftSize, Prompt, Target
from tandem.telemetry.stages import ENGINE_STAGES, GATHER, QUEUE, StageClock, StageTimes, busy_of


class Ledger(StageClock):
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
            for stage in (QUEUE, GATHER):
                self._add(f"{role}_prefill_{stage}", times.of(stage))

    def start_round(self) -> None:
        """A draft is asked for."""
        self._round_started_ns = time.perf_counter_ns()

    def add_round(self, drafted: Drafted | None, decided: Decided) -> None:
        """Book a round's verdict, and its draft if it had one."""
        verify = decided.times
        self._add_step("verify", verify)
        if drafted is None:
            return
        draft = drafted.times
        self._add_step("draft", draft)
        self.round_wall_ns.append(time.perf_counter_ns() - self._round_started_ns)
        self.round_model_ns.append(draft.forward_ns + verify.forward_ns)

    def stages_ns(self) -> dict[str, int]:
        """Time in each stage so far; they sum to the text's wall time."""
        self.switch(self._stage)
        return dict(self._spent)

    def _add_step(self, step: str, times: StageTimes) -> None:
        for stage in ENGINE_STAGES:
            self._add(busy_of(step, stage), times.of(stage))

    def _add(self, name: str, nanoseconds: int) -> None:
        self.busy_ns[name] = self.busy_ns.get(name, 0) + nanoseconds


class TimedDrafter:
    """A drafter whose waits are booked."""

    def __init__(self, drafter: Drafter, ledger: Ledger) -> None:
        self._drafter = drafter
        self._ledger = ledger
        self.close = drafter.close
        self.cancel = drafter.cancel

    async def open(self, prompt: Prompt) -> StageTimes:
        """Beside the target's, which is what the text waits for: no stage."""
        times = await self._drafter.open(prompt)
        self._ledger.add_prefill("drafter", times)
        return times

    async def draft(
        self, round_: int, position: int, new_token_ids: Sequence[int], size: DraftSize, exact: bool
    ) -> Drafted:
        """See `peers.Drafter`."""
        with self._ledger.stage("draft_wait"):
            drafted = await self._drafter.draft(round_, position, new_token_ids, size, exact)
        self._ledger.drafted_tokens += len(drafted.token_ids)
        return drafted


class TimedTarget:
    """A target whose waits are booked."""

    def __init__(self, target: Target, ledger: Ledger) -> None:
        self._target = target
        self._ledger = ledger
        self.close = target.close
        self.cancel = target.cancel

    async def open(
        self, prompt: Prompt, verifier: str, size: DraftSize, carry: Any
    ) -> Decided | None:
        """See `peers.Target`."""
        with self._ledger.stage("open_wait"):
            decided = await self._target.open(prompt, verifier, size, carry)
        if decided is not None:
            self._ledger.add_prefill("target", decided.times)
            self._ledger.prefill_tokens += 1
        return decided

    async def verify(self, round_: int, position: int, drafted: Drafted | None) -> Decided:
        """See `peers.Target`."""
        with self._ledger.stage("verify_wait"):
            decided = await self._target.verify(round_, position, drafted)
        self._ledger.add_round(drafted, decided)
        return decided
