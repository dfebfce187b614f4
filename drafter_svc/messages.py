"""Between the drafter's messages and the domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.drafting.ahead.prepare import Came, Made
from tandem.drafting.features import Feature, FeatureSpec
from tandem.errors import InvalidRequest
from tandem.rpc import messages
from tandem.speculation.draft import Draft
from tandem.speculation.hidden_dtype import HiddenDtype

# numpy has no bfloat16.
_NUMBERS: dict[HiddenDtype, np.dtype[Any]] = {
    HiddenDtype.BFLOAT16: np.dtype("<i2"),
    HiddenDtype.FLOAT32: np.dtype("<f4"),
}


def feedback_spec(wants: FeatureSpec | None) -> common_pb2.FeedbackSpec | None:
    """What a drafter wants of the target, as the handshake says it."""
    if wants is None:
        return None
    return common_pb2.FeedbackSpec(
        layers=wants.layers,
        hidden_dtype=messages.hidden_dtype_to(wants.dtype),
        prompt_tokens=wants.prompt_tokens,
    )


_OUTCOMES = {
    Came.HIT: drafter_pb2.DraftedStep.OUTCOME_HIT,
    Came.LATE: drafter_pb2.DraftedStep.OUTCOME_LATE,
    Came.MISS: drafter_pb2.DraftedStep.OUTCOME_MISS,
}


def prepared_to(made: Made) -> drafter_pb2.DraftedStep.Prepared | None:
    """What was prepared of a draft; None where nothing was."""
    if made.came is None:
        return None
    return drafter_pb2.DraftedStep.Prepared(
        outcome=_OUTCOMES[made.came], ready_ns=made.ready_ns, drafts=made.drafts
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


def features_from(
    request: drafter_pb2.DraftStep, wants: FeatureSpec | None, length: int
) -> list[Feature]:
    """Hidden states that came with a step.

    Args:
        request: the step.
        wants: those that the drafter asked for.
        length: of the text behind the step's new tokens.

    Raises:
        InvalidRequest: they are not what was asked for.
    """
    if request.feedback and wants is None:
        raise InvalidRequest("draft.feedback must be empty: this drafter asks for none")
    found: list[Feature] = []
    before = -1
    for place, message in enumerate(request.feedback):
        assert wants is not None
        name, count = f"draft.feedback[{place}]", message.positions
        if not before < message.round < request.round:
            raise InvalidRequest(f"{name}.round is {message.round}, behind {before}")
        before = message.round
        # The last token of the text is not computed yet.
        if not 1 <= count < length - message.first:
            raise InvalidRequest(
                f"{name} has {count} positions from {message.first} on, the text {length} tokens"
            )
        if len(message.hidden) != count * wants.bytes:
            raise InvalidRequest(
                f"{name}.hidden has {len(message.hidden)} bytes, {count} positions have"
                f" {count * wants.bytes}"
            )
        states = np.frombuffer(message.hidden, _NUMBERS[wants.dtype])
        shape = count, len(wants.layers), wants.hidden_size
        found.append(Feature(message.first, states.reshape(shape)))
    return found
