"""What a text's sequences on its services share: whom they are for, and how answers are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.errors import Unavailable
from tandem.rpc import messages
from tandem.rpc.streams.call import SequenceCall
from tandem.speculation.feedback import NO_FEEDBACK, FeedbackWanted
from tandem.speculation.tree import DraftSize, Tree
from tandem.target.v1 import target_pb2
from tandem.telemetry.stages import StageTimes

# Upper bound of the times that a service reports: they are summed in 64 bits, and used in
# estimates. A day is more than any stage takes.
MOST_STAGE_NS = 86_400 * 10**9


@dataclass(frozen=True)
class CountingOn:
    """The replica that a sequence is meant for, which may be another by now.

    Attributes:
        fingerprint: that it has to have.
        note_load: takes how many sequences it says it has open.
        incarnation: of the process that was asked what it serves; 0 compares nothing.
        prepares: whether it is a drafter that prepares drafts.
        learns: whether it is a drafter whose feedback is for learning alone, not for its drafts.
        resumes: whether it is a target that can open a text between two rounds.
        feedback: of a drafter, what it wants; of a target, what it is asked to give to one.
    """

    fingerprint: str
    note_load: Callable[[int], None]
    incarnation: int = 0
    prepares: bool = False
    learns: bool = False
    resumes: bool = False
    feedback: FeedbackWanted = NO_FEEDBACK

    def require_same(self, opened: drafter_pb2.OpenedSequence | target_pb2.OpenedSequence) -> None:
        """Refuse an opening by a process that has not been asked yet.

        Raises:
            Unavailable: it is another one.
        """
        self.note_load(opened.open_sequences)
        if self.incarnation not in (0, opened.incarnation):
            raise Unavailable("a service has restarted; try again")


def parents_of(
    call: SequenceCall[Any, Any], draft: common_pb2.Draft, size: DraftSize
) -> list[int] | None:
    """Where the tokens of a draft hang; None for a chain.

    Raises:
        PeerFailure: it is no tree, or not of the size that was asked for.
    """
    parents, count, expect = list(draft.parents), len(draft.token_ids), call.expect
    if not parents or parents == list(range(count)):
        expect("depth of the draft", count, 0, size.gamma)
        return None
    expect("len(draft.parents)", len(parents), count, count if size.nodes else 0)
    for node, parent in enumerate(parents):
        expect(f"draft.parents[{node}]", parent, 0, node)
    expect("depth of the draft", Tree(parents).depth, 0, size.gamma)
    return parents


def times_of(call: SequenceCall[Any, Any], answer: Any) -> StageTimes:
    """What an answer says of its times; see `checked_times`."""
    return checked_times(call, answer.times)


def checked_times(call: SequenceCall[Any, Any], told: common_pb2.StageTimes) -> StageTimes:
    """Times as a service tells them.

    Raises:
        PeerFailure: nothing can have taken so long.
    """
    times = messages.times_from(told)
    if times.total_ns > MOST_STAGE_NS:
        longest = max(times.queue_ns, times.gather_ns, times.forward_ns, times.numbers_ns)
        call.expect("the longest of times", longest, 0, MOST_STAGE_NS)
    return times
