"""A text's replicas: picked from the pool when it needs one, counted while it has them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from orchestrator.pool.pool import ReplicaPool
from orchestrator.pool.prefixes import Prefix
from orchestrator.pool.retry_budget import RetryBudget
from orchestrator.settings import OrchestratorSettings
from tandem.errors import (
    DrafterLost,
    Exhausted,
    OutOfTime,
    SequenceGivenBack,
    SequenceIdled,
    TandemError,
    Unavailable,
)
from tandem.peers.grpc.clients import DrafterClient, TargetClient
from tandem.peers.replicas.compatibility import Capabilities
from tandem.peers.replicas.drafter_of_text import DrafterOfText, counting_on
from tandem.peers.replicas.replica import Replica
from tandem.peers.text.contracts import TextDrafter, TextTarget
from tandem.peers.text.record import TextRecord

# Of one text. Whatever loses its target so often may be the text itself.
_MOST_REPLACEMENTS = 16
# Between two attempts to open a text where no target has room for it, at first and at most: it has
# waited there too.
_ROOM_SECONDS, _MOST_PAUSE_SECONDS = 0.1, 1.0
# Given back as often, a text goes first (`TargetWithFailover`); and if it is given back further.
_MOST_GIVEN_BACK, _MANY = 3, 32
# A text without a deadline waits no longer for room: others, which have it, have ended by then.
_MOST_ROOM_SECONDS = 600.0


class PeersOfText:
    """Makes sequences on the replicas that the pool picks; use it as a context manager.

    Attributes:
        drafting: its drafter, as it comes and goes.

    Args:
        pool: picks them.
        capabilities: that the text counts on.
        remaining: seconds until the caller's deadline; None for none.
        budget: allows changes to other targets.
        settings: how long it waits for others.
        record: the text's.
        prefix: the text's; None where any replica suits as well as another.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        capabilities: Capabilities,
        remaining: float | None,
        budget: RetryBudget,
        settings: OrchestratorSettings,
        record: TextRecord,
        prefix: Prefix | None = None,
    ) -> None:
        self._pool = pool
        self._prefix = prefix
        self._capabilities = capabilities
        self._deadline = None if remaining is None else time.monotonic() + remaining
        self._budget = budget
        self._failover_seconds = settings.failover_seconds
        self._queue_seconds = settings.queue_seconds
        self._record = record
        # Apart from the drafter's stack: a failure of one does not mark the other as failed. A lost
        # drafter is noted when it is lost, a target when its failure ends the text.
        self._targets = ExitStack()
        self.drafting = DrafterOfText(pool.drafter_deadlines, record)
        self._target: Replica[TargetClient] | None = None
        self._left: dict[tuple[Replica[TargetClient], int], float] = {}
        self._replacements = 0
        # Since when it has been waiting for room; who has refused it since the last pause.
        self._short_since: float | None = None
        self._full: dict[tuple[Replica[TargetClient], int], float] = {}
        self._pause = _ROOM_SECONDS
        self._promises = False  # whether any of these promises more than it has

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.let_drafter_go()
        if isinstance(error, DrafterLost):
            self._targets.close()
        else:
            self._targets.__exit__(kind, error, traceback)

    async def target(self) -> TextTarget:
        """See `TextPeers`."""
        self._budget.note_text()
        replica = await self._pool.next_target(
            self._capabilities, self._left, self._failover_seconds, self._prefix
        )
        if replica is None:
            raise Unavailable("no target is available; try again")
        return self._target_on(replica)

    async def next_target(self, lost: TandemError) -> TextTarget:
        """See `TextPeers`."""
        assert self._target is not None
        # A request that is too large is not refused for room, and comes to be no smaller.
        refused = isinstance(lost, Exhausted) and lost.retry_seconds is not None
        if isinstance(lost, SequenceGivenBack) or refused:
            return await self._target_with_room(lost)
        self._short_since, self._full, self._pause = None, {}, _ROOM_SECONDS
        if not isinstance(lost, SequenceIdled):  # else it has not failed, and may go on
            self._leave(self._target)
            if isinstance(lost, Unavailable):
                self._target.note_failure()
        self._targets.close()
        self._replacements += 1
        if self._replacements > _MOST_REPLACEMENTS or not self._budget.take():
            lost.add_note("it was moved too often, or too many texts were")
            raise lost
        replica = await self._pool.next_target(
            self._capabilities,
            self._left,
            self._patience if isinstance(lost, Unavailable) else 0.0,
            self._prefix,
        )
        if replica is None:
            raise lost
        return self._target_on(replica)

    async def _target_with_room(self, lost: TandemError) -> TextTarget:
        """A target to ask for room: another one as long as there is one that was not asked, then
        all again. No target has failed, and the text has not: no budget is touched.

        Raises:
            Exhausted: none had room for long.
            TandemError: what was lost, where there is no target.
        """
        assert self._target is not None
        self._targets.close()
        now = time.monotonic()
        self._promises |= self._target.reply.info.overcommit > 1
        if isinstance(lost, SequenceGivenBack):
            self._record.note_given_back()
            self._full = {}
        times = self._record.counts.given_back
        if self._short_since is None or (isinstance(lost, SequenceGivenBack) and times < _MANY):
            self._short_since, self._pause = now, _ROOM_SECONDS
        waited = now - self._short_since
        if isinstance(lost, Exhausted) and times >= _MOST_GIVEN_BACK:
            # It goes first there, and keeps its turn if it comes back soon.
            await self._wait_for_room(lost, waited)
            return self._target_on(self._target)
        if isinstance(lost, Exhausted):
            self._full[_process_of(self._target)] = math.inf
        elif times >= _MANY:  # no target of ours does that
            await self._wait_for_room(lost, waited)
        replica = await self._pool.next_target(
            self._capabilities, {**self._left, **self._full}, 0.0, self._prefix
        )
        if replica is None:
            self._full = {}
            await self._wait_for_room(lost, waited)
            replica = await self._pool.next_target(
                self._capabilities, self._left, self._patience, self._prefix
            )
        if replica is None:
            raise lost
        return self._target_on(replica)

    async def _wait_for_room(self, lost: TandemError, waited: float) -> None:
        """A moment. Who promises more than there is lets texts wait as long as their callers do;
        others hold what they promise, and are full of texts that this orchestrator does not know.

        Raises:
            Exhausted: it has waited for long enough.
        """
        most = _MOST_ROOM_SECONDS if self._promises else self._queue_seconds
        if self._promises and self._deadline is not None:
            most = math.inf  # the call ends then
        if waited + self._pause > most:
            raise lost
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, _MOST_PAUSE_SECONDS)

    @property
    def _patience(self) -> float:
        """How long to wait for a target, where there is none."""
        left = self._remaining
        return self._failover_seconds if left is None else min(self._failover_seconds, left)

    def _leave(self, replica: Replica[TargetClient]) -> None:
        """Come back to this process at most once."""
        left = _process_of(replica)
        self._left[left] = math.inf if left in self._left else time.monotonic()

    def _target_on(self, replica: Replica[TargetClient]) -> TextTarget:
        self._target = replica
        self._pool.sent_to_targets.note(self._prefix, replica)
        client = self._targets.enter_context(replica.serve())
        limit = self._capabilities.target.max_message_bytes
        return client.sequence(
            self._remaining,
            self._pool.target_deadlines.of(lambda: self._pool.is_alone(replica)),
            self._record,
            limit,
            counting_on(replica, self._capabilities.feedback),
        )

    def drafter(self) -> TextDrafter | None:
        """See `TextPeers`."""
        law = self._capabilities.law
        return self._drafter_on(self._pool.pick_drafter(law, self._zone, self._prefix))

    async def drafter_with_room(self) -> TextDrafter:
        """A fresh sequence on a drafter, as soon as one has room.

        Raises:
            OutOfTime: the caller's deadline passed.
            Unavailable: a text without a deadline waited too long.
        """
        left = self._remaining
        seconds = self._queue_seconds if left is None else left
        replica = await self._pool.next_drafter(
            self._capabilities.law, self._zone, seconds, self._prefix
        )
        drafter = self._drafter_on(replica)
        if drafter is not None:
            return drafter
        kind = Unavailable if left is None else OutOfTime
        failure = self.drafting.failure
        found = (
            "none had room for"
            if failure is None
            else f"it failed ({failure}), and no other came in"
        )
        raise kind(
            f"a text with seed and gamma waits for its drafter, and {found}"
            f" {seconds:.3g} s; try again, or leave out seed or gamma"
        )

    def remember(self, token_ids: Sequence[int]) -> None:
        """Have a text that goes on where this one ends find its replicas.

        Args:
            token_ids: of the prompt and of all that was emitted.
        """
        if self._prefix is None:
            return
        self._prefix.grow(token_ids)
        if self._target is not None:
            self._pool.sent_to_targets.note(self._prefix, self._target)
        if self.drafting.replica is not None:
            self._pool.sent_to_drafters.note(self._prefix, self.drafting.replica)

    def let_drafter_go(self) -> None:
        """The drafter serves the text no more: it has room for another."""
        self.drafting.let_go()
        self._pool.note_room()

    @property
    def _zone(self) -> str:
        """The target's."""
        return self._target.reply.info.zone if self._target is not None else ""

    def _drafter_on(self, replica: Replica[DrafterClient] | None) -> TextDrafter | None:
        offered = self._capabilities
        if offered.drafter is None:
            return None
        if replica is not None:
            self._pool.sent_to_drafters.note(self._prefix, replica)
        return self.drafting.begin(
            replica,
            self._remaining,
            offered.drafter.max_message_bytes,
            offered.target.max_message_bytes,
        )

    @property
    def _remaining(self) -> float | None:
        """Seconds until the caller's deadline, now."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)


def _process_of(replica: Replica[TargetClient]) -> tuple[Replica[TargetClient], int]:
    """The process that is a replica now."""
    return replica, replica.reply.info.incarnation
