"""Between the drafter's messages and the domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.drafting.ahead.prepare import Came, Made
from tandem.drafting.features import Feature, FeatureSpec
from tandem.errors import InvalidRequest
from tandem.rpc import messages
from tandem.speculation.draft import Draft
from tandem.speculation.hidden_dtype import HiddenDtype
from tandem.speculation.predictions import Predictions, PredictionsWanted

# numpy has no bfloat16.
_NUMBERS: dict[HiddenDtype, np.dtype[Any]] = {
    HiddenDtype.BFLOAT16: np.dtype("<i2"),
    HiddenDtype.FLOAT32: np.dtype("<f4"),
}


def feedback_spec(
    wants: FeatureSpec | None, predicts: PredictionsWanted | None
) -> common_pb2.FeedbackSpec | None:
    """What a drafter wants of the target, as the handshake says it."""
    if wants is None and predicts is None:
        return None
    message = common_pb2.FeedbackSpec()
    if wants is not None:
        message.layers.extend(wants.layers)
        message.hidden_dtype = messages.hidden_dtype_to(wants.dtype)
        message.prompt_tokens = wants.prompt_tokens
    if predicts is not None:
        everywhere = common_pb2.PREDICTED_AT_ALL
        message.top = predicts.top
        message.predicted_at = everywhere if predicts.everywhere else common_pb2.PREDICTED_AT_KEPT
    return message


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


def check_rounds(request: drafter_pb2.DraftStep, asked: bool) -> None:
    """Refuse feedback that was not asked for, or is not in the order of its rounds.

    Args:
        request: the step.
        asked: whether the drafter asks for any.

    Raises:
        InvalidRequest: which it is.
    """
    if request.feedback and not asked:
        raise InvalidRequest("draft.feedback must be empty: this drafter asks for none")
    before = -1
    for place, message in enumerate(request.feedback):
        if not before < message.round < request.round:
            raise InvalidRequest(
                f"draft.feedback[{place}].round is {message.round}: rounds must ascend, and come"
                f" before the step's, {request.round}"
            )
        before = message.round


def predictions_from(
    request: drafter_pb2.DraftStep,
    predicts: PredictionsWanted | None,
    last: tuple[int, int],
    vocab_size: int,
) -> Predictions | None:
    """Predictions of the round of the last draft; None where they did not come, or where other
    rounds came in between.

    Args:
        request: the step.
        predicts: those that the drafter asked for.
        last: round of the last draft, and its candidates and probes together.
        vocab_size: the target's.

    Raises:
        InvalidRequest: they are not what was asked for.
    """
    found = None
    for number, message in enumerate(request.feedback):
        name = f"draft.feedback[{number}]"
        if predicts is None:
            if message.places or message.predicted_ids or message.HasField("predictions"):
                raise InvalidRequest(f"{name}.places must be empty: none are asked for")
        elif message.round == last[0] == request.round - 1:
            places = list(message.places)
            if places != sorted(set(places)) or (places and places[-1] > last[1]):
                raise InvalidRequest(f"{name}.places must ascend, up to {last[1]}")
            rows = _rows_from if predicts.top > 1 else _ids_from
            ids, weights = rows(message, predicts.top, name)
            largest = max((int(row.max()) for row in ids), default=0)
            if largest >= vocab_size:
                raise InvalidRequest(
                    f"{name}.predictions holds id {largest}, the vocabulary has {vocab_size}"
                )
            found = Predictions(message.round, places, ids, weights)
    return found


_Ids = list[npt.NDArray[np.uint32]]
_Weights = list[npt.NDArray[np.uint16]]


def _ids_from(message: common_pb2.Feedback, top: int, name: str) -> tuple[_Ids, None]:
    """The likeliest token of each place."""
    if len(message.predicted_ids) != len(message.places) or message.HasField("predictions"):
        raise InvalidRequest(f"{name}.predicted_ids must have one for each place")
    return [np.array([token_id], np.uint32) for token_id in message.predicted_ids], None


def _rows_from(message: common_pb2.Feedback, top: int, name: str) -> tuple[_Ids, _Weights]:
    """The likeliest tokens of each place, with their weights."""
    rows, count = message.predictions, len(message.places)
    sizes = list(rows.sizes)
    if message.predicted_ids:
        raise InvalidRequest(f"{name}.predicted_ids must be empty: rows are asked for")
    if len(sizes) != count or not all(1 <= size <= top for size in sizes):
        raise InvalidRequest(f"{name}.predictions.sizes must have 1..{top} for each place")
    if len(rows.ids) != 4 * sum(sizes) or len(rows.weights) != 2 * sum(sizes):
        raise InvalidRequest(f"{name}.predictions has another size than its sizes say")
    if not count:
        return [], []
    ends = np.cumsum(sizes)[:-1]
    ids = np.split(np.frombuffer(rows.ids, "<u4"), ends)
    weights = np.frombuffer(rows.weights, "<u2")
    if not weights.all():
        raise InvalidRequest(f"{name}.predictions.weights holds a weight of 0")
    if any(len(np.unique(row)) < len(row) for row in ids):
        raise InvalidRequest(f"{name}.predictions.ids holds a token id twice in a row")
    return ids, np.split(weights, ends)


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
    found: list[Feature] = []
    for place, message in enumerate(request.feedback):
        name, count = f"draft.feedback[{place}]", message.positions
        if wants is None:
            if count or message.hidden:
                raise InvalidRequest(f"{name}.positions must be 0: no hidden states are asked for")
            continue
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
