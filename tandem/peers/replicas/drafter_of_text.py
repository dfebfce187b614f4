"""A text's drafter: picked when it needs one, counted while it has it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from tandem.errors import Exhausted, TandemError
from tandem.peers.grpc.calls import CountingOn
from tandem.peers.grpc.clients import DrafterClient, TargetClient
from tandem.peers.grpc.deadlines import Deadlines
from tandem.peers.replicas.compatibility import wish_from
from tandem.peers.replicas.replica import Replica
from tandem.peers.text.contracts import TextDrafter
from tandem.peers.text.record import TextRecord
from tandem.speculation.feedback import NO_FEEDBACK, FeedbackWanted


class DrafterOfText:
    """Makes a text's sequences on drafters, one after the other.

    Attributes:
        replica: that serves it now; None where none does.
        failure: of the last one, if it had not merely no room; None from the next one on.

    Args:
        deadlines: of its stages.
        record: the text's.
    """

    def __init__(self, deadlines: Deadlines, record: TextRecord) -> None:
        self._deadlines = deadlines
        self._record = record
        self._serving = ExitStack()
        self.replica: Replica[DrafterClient] | None = None
        self.failure: TandemError | None = None

    def begin(
        self,
        replica: Replica[DrafterClient] | None,
        remaining: float | None,
        max_bytes: int,
        target_max_bytes: int,
    ) -> TextDrafter | None:
        """A fresh sequence; None where there is no drafter.

        Args:
            replica: that is to have it.
            remaining: seconds that it may last; None for any.
            max_bytes: of a message that the drafter takes.
            target_max_bytes: of a draft that the target takes.
        """
        self.replica = replica
        if replica is None:
            return None
        self.failure = None
        client = self._serving.enter_context(replica.serve())
        waits = self._deadlines.of(lambda: False)  # a text goes on without
        limits = max_bytes, target_max_bytes
        reply = replica.reply
        counting = replace(
            counting_on(replica, wish_from(reply) or NO_FEEDBACK),
            prepares=reply.ahead > 0,
            learns=reply.learns,
        )
        return client.sequence(remaining, waits, self._record, *limits, counting)

    def let_go(self) -> None:
        """It serves the text no more."""
        self._serving.close()
        self.replica = None

    def note_lost(self, error: TandemError | None) -> None:
        """Have others preferred for a while; one that is full has not failed."""
        if self.replica is None:
            return
        if isinstance(error, Exhausted):
            self.replica.note_full()
        else:
            self.replica.note_failure()
            self.failure = error


def counting_on(
    replica: Replica[TargetClient] | Replica[DrafterClient], feedback: FeedbackWanted
) -> CountingOn:
    """What a sequence counts on that is meant for a replica."""
    info = replica.reply.info
    return CountingOn(
        info.fingerprint,
        replica.note_load,
        info.incarnation,
        resumes=info.overcommit > 0,
        feedback=feedback,
    )
