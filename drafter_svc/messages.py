"""Between the drafter's messages and the domain."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.drafter.v1 import drafter_pb2
from tandem.drafting.ahead.prepare import AheadDraft
from tandem.rpc import messages
from tandem.rpc.feedback import spec_to
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import FeedbackWanted
from tandem.speculation.prepared_outcome import PreparedOutcome

_OUTCOMES = {
    PreparedOutcome.HIT: drafter_pb2.DraftedStep.OUTCOME_HIT,
    PreparedOutcome.LATE: drafter_pb2.DraftedStep.OUTCOME_LATE,
    PreparedOutcome.MISS: drafter_pb2.DraftedStep.OUTCOME_MISS,
}


def wish_to(wanted: FeedbackWanted, reply: drafter_pb2.GetModelInfoResponse) -> None:
    """Say in the handshake what the drafter wants of a target; `wish_from` of `tandem.peers` reads
    it. `info` says the size of states.
    """
    if (spec := spec_to(wanted)) is not None:
        reply.feedback.CopyFrom(spec)
    reply.probes, reply.probe_tokens = wanted.probes, wanted.probe_tokens
    reply.made_for = wanted.made_for


def prepared_to(made: AheadDraft) -> drafter_pb2.DraftedStep.Prepared | None:
    """What was prepared of a draft; None where nothing was."""
    if made.outcome is None:
        return None
    return drafter_pb2.DraftedStep.Prepared(
        outcome=_OUTCOMES[made.outcome], ready_ns=made.ready_ns, drafts=made.drafts
    )


def drafts_to(
    round_: int,
    drafts: Sequence[tuple[Sequence[int], Draft]],
    most_bytes: int,
    open_sequences: int,
) -> drafter_pb2.PreparedDrafts:
    """Prepared drafts with the tokens of their outcomes, as many as fit."""
    message = drafter_pb2.PreparedDrafts(
        round=round_, prepared=len(drafts), open_sequences=open_sequences
    )
    most_bytes -= message.ByteSize()
    for token_ids, draft in drafts:
        sent = messages.draft_to(draft)
        most_bytes -= sent.ByteSize() + 8 * (1 + len(token_ids))
        if most_bytes < 0:
            break
        message.drafts.add(new_token_ids=token_ids, draft=sent)
    return message
