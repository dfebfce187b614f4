"""A text's replicas: picked from the pool when it needs one, counted while it has them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from orchestrator.calls import CountingOn, Waits
from orchestrator.clients import DrafterClient, TargetClient
from orchestrator.ledger import Ledger, TimedDrafter, TimedTarget
from orchestrator.offer import Offer
from orchestrator.peers import Drafter, Target
from orchestrator.pool import Pool
from orchestrator.replica import Replica
from orchestrator.spans import TextSpans
from tandem.errors import DrafterLost, TandemError, Unavailable


class LeasedPeers:
    """Makes sequences on the replicas with the fewest texts; use it as a context manager.

    Args:
        pool: picks them.
        offer: that the text counts on.
        remaining: seconds until the caller's deadline; None for none.
        waits: bounds on every wait.
        ledger: books them.
        spans: the text's.
    """

    def __init__(
        self,
        pool: Pool,
        offer: Offer,
        remaining: float | None,
        waits: Waits,
        ledger: Ledger,
        spans: TextSpans,
    ) -> None:
        self._pool = pool
        self._offer = offer
        self._deadline = None if remaining is None else time.monotonic() + remaining
        self._waits = waits
        self._ledger = ledger
        self._spans = spans
        # Apart, since a failure of one must not have the other shunned: a lost drafter is noted
        # when it is lost, a target when its failure ends the text.
        self._targets, self._drafters = ExitStack(), ExitStack()
        self._drafting: Replica[DrafterClient] | None = None
        self._used: list[Replica[TargetClient]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._drafters.close()
        if isinstance(error, DrafterLost):
            self._targets.close()
        else:
            self._targets.__exit__(kind, error, traceback)

    def target(self) -> Target:
        """See `peers.Peers`."""
        targets = self._pool.targets(self._offer)
        if not targets:
            raise Unavailable("no target is available; try again")
        return self._target_on(targets[0])

    def next_target(self, lost: TandemError) -> Target:
        """See `peers.Peers`."""
        if isinstance(lost, Unavailable):
            self._used[-1].note_failure()
        others = self._pool.targets(self._offer, self._used)
        if not others:
            raise lost
        self._targets.close()
        return self._target_on(others[0])

    def _target_on(self, replica: Replica[TargetClient]) -> Target:
        self._used.append(replica)
        client = self._targets.enter_context(replica.lease())
        limit = self._offer.target.max_message_bytes
        call = client.sequence(
            self._remaining, self._waits, self._spans, limit, _counting_on(replica)
        )
        return TimedTarget(call, self._ledger)

    def drafter(self) -> Drafter | None:
        """See `peers.Peers`."""
        zone = self._used[-1].reply.info.zone if self._used else ""
        self._drafters.close()  # of one that was let go
        replica = self._drafting = self._pool.pick_drafter(zone)
        if replica is None or self._offer.drafter is None:
            return None
        client = self._drafters.enter_context(replica.lease())
        limit, own = self._offer.target.max_message_bytes, self._offer.drafter.max_message_bytes
        call = client.sequence(
            self._remaining, self._waits, self._spans, own, limit, _counting_on(replica)
        )
        return TimedDrafter(call, self._ledger)

    @property
    def _remaining(self) -> float | None:
        """Seconds until the caller's deadline, now."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def note_lost_drafter(self) -> None:
        """Have others preferred for a while."""
        if self._drafting is not None:
            self._drafting.note_failure()


def _counting_on(replica: Replica[TargetClient] | Replica[DrafterClient]) -> CountingOn:
    return CountingOn(replica.reply.info.fingerprint, replica.note_load)
