"""Between feedback and its messages, `FeedbackSpec` and `Feedback` in common.proto."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tandem.common.v1 import common_pb2
from tandem.errors import InvalidRequest
from tandem.rpc.messages import AROUND_BYTES
from tandem.speculation.feedback import (
    MASS_BYTES,
    MOST_LAYERS,
    MOST_PREDICTED,
    WHOLE_MASS,
    Feedback,
    FeedbackGiven,
    FeedbackWanted,
    HiddenDtype,
    Row,
)

_DTYPES = {
    HiddenDtype.BFLOAT16: common_pb2.HIDDEN_DTYPE_BFLOAT16,
    HiddenDtype.FLOAT32: common_pb2.HIDDEN_DTYPE_FLOAT32,
}
_NAMED_DTYPES = {value: dtype for dtype, value in _DTYPES.items()}
# numpy has no bfloat16.
_NUMBERS: dict[HiddenDtype, np.dtype[Any]] = {
    HiddenDtype.BFLOAT16: np.dtype("<i2"),
    HiddenDtype.FLOAT32: np.dtype("<f4"),
}
_EVERYWHERE = {common_pb2.PREDICTED_AT_KEPT: False, common_pb2.PREDICTED_AT_ALL: True}
_ONE = np.ones(1, np.uint16)


def spec_to(wanted: FeedbackWanted) -> common_pb2.FeedbackSpec | None:
    """What a drafter wants to be told, as the handshake says it; None for nothing."""
    if not wanted.told:
        return None
    message = common_pb2.FeedbackSpec()
    if wanted.layers:
        message.layers.extend(wanted.layers)
        message.hidden_dtype = _DTYPES[wanted.dtype]
        message.prompt_tokens = wanted.prompt_tokens
    if wanted.top:
        everywhere = common_pb2.PREDICTED_AT_ALL
        message.top = wanted.top
        message.predicted_at = everywhere if wanted.everywhere else common_pb2.PREDICTED_AT_KEPT
    return message


def spec_from(message: common_pb2.FeedbackSpec, hidden_size: int) -> FeedbackWanted | None:
    """The same from a handshake; None where the dtype of its states is not known.

    Args:
        message: as received.
        hidden_size: of the states that are meant.
    """
    dtype = _NAMED_DTYPES.get(message.hidden_dtype)
    if message.layers and dtype is None:
        return None
    found = FeedbackWanted(
        layers=tuple(message.layers),
        hidden_size=hidden_size,
        dtype=dtype or HiddenDtype.BFLOAT16,
        prompt_tokens=message.prompt_tokens,
        top=message.top,
        everywhere=message.predicted_at == common_pb2.PREDICTED_AT_ALL,
    )
    came, known = message.SerializeToString(deterministic=True), spec_to(found)
    if came == (b"" if known is None else known.SerializeToString(deterministic=True)):
        return found
    return replace(found, later=came)


def given_from(
    info: common_pb2.ModelInfo,
    *,
    layers: Sequence[int],
    probe_tokens: int,
    message_bytes: int | None = None,
) -> FeedbackGiven:
    """What a target of any version can tell, by its handshake; see `FeedbackGiven`."""
    return FeedbackGiven(
        name=f"the target ({info.model})",
        weights_fingerprint=info.weights_fingerprint,
        hidden_size=info.hidden_size,
        layers=layers,
        probe_tokens=probe_tokens,
        max_nodes=info.max_nodes,
        message_bytes=message_bytes,
    )


class FeedbackRoom(NamedTuple):
    """What a target has for a text's feedback.

    Attributes:
        layers: whose states it can give.
        hidden_size: of these.
        message_bytes: of its largest message.
        prompt_tokens: of the text.
        places: of its largest draft and probes.
    """

    layers: Sequence[int]
    hidden_size: int
    message_bytes: int
    prompt_tokens: int
    places: int


def wanted_from(message: common_pb2.FeedbackSpec, room: FeedbackRoom) -> FeedbackWanted | None:
    """What a text's drafter wants to be told, from `open`; None for nothing.

    Raises:
        InvalidRequest: the target cannot give it, or it does not fit into a message.
    """
    _check_states(message, room)
    wanted = spec_from(message, room.hidden_size)
    if wanted is None:
        raise InvalidRequest(f"open.feedback.hidden_dtype {message.hidden_dtype} is unknown")
    fitting = room.message_bytes - AROUND_BYTES
    if wanted.layers:
        wanted = replace(wanted, prompt_tokens=min(wanted.prompt_tokens, room.prompt_tokens))
        if wanted.prompt_tokens > (most := fitting // wanted.state_bytes):
            raise InvalidRequest(
                f"open.feedback.prompt_tokens may be {most} here, got {wanted.prompt_tokens}: more"
                f" hidden states do not fit into a message of {room.message_bytes} bytes"
            )
    _check_predictions(message)
    if wanted.top and (needed := room.places * wanted.predicted_bytes) > fitting:
        raise InvalidRequest(
            f"open.feedback.top: {message.top} tokens at {room.places} places are {needed} bytes,"
            f" more than fits into a message of {room.message_bytes}"
        )
    return wanted.of(room.layers) if wanted.told else None


def _check_states(message: common_pb2.FeedbackSpec, room: FeedbackRoom) -> None:
    if not message.layers:
        if message.prompt_tokens or message.hidden_dtype:
            raise InvalidRequest(
                "open.feedback.layers must not be empty where prompt_tokens or hidden_dtype is set"
            )
        return
    chosen = list(message.layers[: MOST_LAYERS + 1])
    if len(chosen) > MOST_LAYERS or len(set(chosen)) < len(chosen):
        raise InvalidRequest(f"open.feedback.layers may hold {MOST_LAYERS} layers, each once")
    if lacking := [layer for layer in chosen if layer not in room.layers]:
        raise InvalidRequest(
            f"open.feedback.layers holds layer {lacking[0]}; the target gives {list(room.layers)}"
            " (its FEEDBACK)"
        )


def _check_predictions(message: common_pb2.FeedbackSpec) -> None:
    if not message.top:
        if message.predicted_at:
            raise InvalidRequest("open.feedback.predicted_at must be unset where top is 0")
        return
    if message.top > MOST_PREDICTED:
        raise InvalidRequest(f"open.feedback.top must be 0..{MOST_PREDICTED}, got {message.top}")
    if message.predicted_at not in _EVERYWHERE:
        raise InvalidRequest(f"open.feedback.predicted_at {message.predicted_at} is unknown")


def feedback_to(told: Feedback, wanted: FeedbackWanted) -> common_pb2.Feedback:
    """What a target tells, as it travels.

    Args:
        told: on the host, its positions following each other.
        wanted: by whom it is for.
    """
    message = common_pb2.Feedback(round=told.round)
    if told.states is not None:
        little = told.states.astype(told.states.dtype.newbyteorder("<"), copy=False)
        message.first, message.positions = told.positions[0], len(told.positions)
        message.hidden = little.tobytes()
    if told.predicted is not None:
        rows = told.predicted.values()
        message.places.extend(told.predicted)
        if wanted.top == 1:
            message.predicted_ids.extend(int(row.ids[0]) for row in rows)
        else:
            sent = message.predictions
            sent.sizes.extend(len(row.ids) for row in rows)
            sent.ids = b"".join(row.ids.astype("<u4").tobytes() for row in rows)
            sent.weights = b"".join(row.weights.astype("<u2").tobytes() for row in rows)
            message.masses.extend(row.mass for row in rows)
    return message


def bytes_of(told: common_pb2.Feedback) -> int:
    """Size of the states and predictions, without what is around them."""
    rows = told.predictions
    single = 4 * len(told.predicted_ids) + MASS_BYTES * len(told.masses)
    return len(told.hidden) + len(rows.ids) + len(rows.weights) + single


class Listener(NamedTuple):
    """Where a drafter's sequence is when feedback comes.

    Attributes:
        wanted: by its drafter.
        round: of the step that brings it.
        last_draft: round of its last draft, and that draft's candidates and probes together.
        length: of the text after the step's new tokens.
        vocab_size: of the target.
    """

    wanted: FeedbackWanted
    round: int
    last_draft: tuple[int, int]
    length: int
    vocab_size: int


def feedback_from(told: Sequence[common_pb2.Feedback], listener: Listener) -> list[Feedback]:
    """What came with a step of a drafter. Predictions are those of the round of its last draft;
    there are none if other rounds came in between.

    Raises:
        InvalidRequest: it is not what was asked for, or not in the order of its rounds.
    """
    wanted = listener.wanted
    if told and not wanted.told:
        raise InvalidRequest("draft.feedback must be empty: this drafter asks for none")
    before = -1
    for number, message in enumerate(told):
        if not before < message.round < listener.round:
            raise InvalidRequest(
                f"draft.feedback[{number}].round is {message.round}: rounds must ascend, and come"
                f" before the step's, {listener.round}"
            )
        before = message.round
    found = []
    for number, message in enumerate(told):
        name = f"draft.feedback[{number}]"
        positions, states = _states_from(message, wanted, listener.length, name)
        predicted = _predicted_from(message, listener, name)
        found.append(Feedback(message.round, positions, states, predicted))
    return found


def _states_from(
    message: common_pb2.Feedback, wanted: FeedbackWanted, length: int, name: str
) -> tuple[range, np.ndarray | None]:
    """Hidden states, and their positions."""
    count = message.positions
    if not wanted.layers:
        if count or message.hidden:
            raise InvalidRequest(f"{name}.positions must be 0: no hidden states are asked for")
        return range(0), None
    # The last token of the text is not computed yet.
    if not 1 <= count < length - message.first:
        raise InvalidRequest(
            f"{name} has {count} positions from {message.first} on, the text {length} tokens"
        )
    if len(message.hidden) != count * wanted.state_bytes:
        raise InvalidRequest(
            f"{name}.hidden has {len(message.hidden)} bytes, {count} positions have"
            f" {count * wanted.state_bytes}"
        )
    states = np.frombuffer(message.hidden, _NUMBERS[wanted.dtype])
    shape = count, len(wanted.layers), wanted.hidden_size
    return range(message.first, message.first + count), states.reshape(shape)


def _predicted_from(
    message: common_pb2.Feedback, listener: Listener, name: str
) -> dict[int, Row] | None:
    """Predictions; None where none are asked for, or of use."""
    top, (last_round, last_place) = listener.wanted.top, listener.last_draft
    if not top:
        predicted = message.predicted_ids or message.masses or message.HasField("predictions")
        if message.places or predicted:
            raise InvalidRequest(f"{name}.places must be empty: none are asked for")
        return None
    if not message.round == last_round == listener.round - 1:
        return None
    places = list(message.places)
    if places != sorted(set(places)) or (places and places[-1] > last_place):
        raise InvalidRequest(f"{name}.places must ascend, up to {last_place}")
    rows = _rows_from(message, top, name) if top > 1 else _ids_from(message, name)
    largest = max((int(row.ids.max()) for row in rows), default=0)
    if largest >= listener.vocab_size:
        raise InvalidRequest(
            f"{name}.predictions holds id {largest}, the vocabulary has {listener.vocab_size}"
        )
    return dict(zip(places, rows, strict=True))


def _ids_from(message: common_pb2.Feedback, name: str) -> list[Row]:
    """The likeliest token of each place."""
    if len(message.predicted_ids) != len(message.places) or message.HasField("predictions"):
        raise InvalidRequest(f"{name}.predicted_ids must have one for each place")
    if message.masses:
        raise InvalidRequest(f"{name}.masses must be empty: one token of each place is asked for")
    return [Row(np.array([token_id], np.uint32), _ONE) for token_id in message.predicted_ids]


def _rows_from(message: common_pb2.Feedback, top: int, name: str) -> list[Row]:
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
        return []
    ends = np.cumsum(sizes)[:-1]
    ids = np.split(np.frombuffer(rows.ids, "<u4"), ends)
    weights = np.frombuffer(rows.weights, "<u2")
    if not weights.all():
        raise InvalidRequest(f"{name}.predictions.weights holds a weight of 0")
    if any(len(np.unique(row)) < len(row) for row in ids):
        raise InvalidRequest(f"{name}.predictions.ids holds a token id twice in a row")
    masses = list(message.masses) or [0] * count
    if len(masses) != count or not all(1 <= mass <= WHOLE_MASS for mass in message.masses):
        raise InvalidRequest(f"{name}.masses must have 1..{WHOLE_MASS} for each place, or none")
    return [Row(*row) for row in zip(ids, np.split(weights, ends), masses, strict=True)]
