"""Between the target's messages and the domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.common.v1 import common_pb2
from tandem.engine.asks import StatesWanted
from tandem.errors import InvalidRequest
from tandem.inference.hidden_states import MOST_LAYERS
from tandem.rpc import messages
from tandem.speculation.predictions import MOST_PREDICTED, Predictions, PredictionsWanted
from tandem.target.v1 import target_pb2
from tandem.verification import LOSSY_VERIFIERS, VERIFIERS, Verifier

_RULES = VERIFIERS | LOSSY_VERIFIERS
_EVERYWHERE = {common_pb2.PREDICTED_AT_KEPT: False, common_pb2.PREDICTED_AT_ALL: True}


def verifier_infos() -> list[target_pb2.VerifierInfo]:
    """What each rule says of itself."""
    return [
        target_pb2.VerifierInfo(
            name=rule.name,
            lossless=rule.lossless,
            takes=messages.shape_to(rule.takes),
            needs_pure=rule.needs_pure,
            fixed_gamma=rule.fixed_gamma,
            resumable=rule.resumable,
            options=[target_pb2.VerifierOption(**option._asdict()) for option in rule.options],
        )
        for _, rule in sorted(_RULES.items())
    ]


def rule_from(request: target_pb2.OpenSequence) -> Verifier[Any]:
    """The rule that decides a text.

    Raises:
        InvalidRequest: there is none of that name, or it has no such options.
    """
    rule = _RULES.get(request.verifier)
    if rule is None:
        raise InvalidRequest(
            f"open.verifier {request.verifier!r} is unknown; use one of {sorted(_RULES)}"
        )
    try:
        return rule.with_options(dict(request.verifier_options))
    except ValueError as error:
        raise InvalidRequest(f"open.verifier_options: {error}") from None


def carry_from(message: common_pb2.VerifierCarry, rule: Verifier[Any], gamma: int) -> Any:
    """A rule's state, as another target returned it; None for no state.

    Raises:
        InvalidRequest: the rule cannot have such a state.
    """
    if len(message.levels) > gamma:
        raise InvalidRequest(f"open.carry holds {len(message.levels)} levels, gamma allows fewer")
    levels = [(level.log_ratio, level.count) for level in message.levels]
    try:
        return rule.carry_from(levels, gamma)
    except ValueError as error:
        raise InvalidRequest(f"open.carry: {error}") from None


def wanted_from(message: common_pb2.FeedbackSpec, layers: Sequence[int]) -> StatesWanted | None:
    """The hidden states that a drafter wants; None for none.

    Args:
        message: as received.
        layers: whose states the target can give.

    Raises:
        InvalidRequest: it cannot give these.
    """
    if not message.layers:
        if message.prompt_tokens or message.hidden_dtype:
            raise InvalidRequest(
                "open.feedback.layers must not be empty where prompt_tokens or hidden_dtype is set"
            )
        return None
    chosen = list(message.layers[: MOST_LAYERS + 1])
    if len(chosen) > MOST_LAYERS or len(set(chosen)) < len(chosen):
        raise InvalidRequest(f"open.feedback.layers may hold {MOST_LAYERS} layers, each once")
    if lacking := [layer for layer in chosen if layer not in layers]:
        raise InvalidRequest(
            f"open.feedback.layers holds layer {lacking[0]}; the target gives {list(layers)}"
            " (its FEEDBACK)"
        )
    dtype = messages.hidden_dtype_from(message.hidden_dtype)
    if dtype is None:
        raise InvalidRequest(f"open.feedback.hidden_dtype {message.hidden_dtype} is unknown")
    return StatesWanted(tuple(layers.index(layer) for layer in chosen), dtype)


def predicted_from(
    message: common_pb2.FeedbackSpec, places: int, info: common_pb2.ModelInfo
) -> PredictionsWanted | None:
    """The predictions that a drafter wants; None for none.

    Args:
        message: as received.
        places: of the largest draft and its probes.
        info: of the target.

    Raises:
        InvalidRequest: they are too many, or it does not say of which places.
    """
    if not message.top:
        if message.predicted_at:
            raise InvalidRequest("open.feedback.predicted_at must be unset where top is 0")
        return None
    if message.top > MOST_PREDICTED:
        raise InvalidRequest(f"open.feedback.top must be 0..{MOST_PREDICTED}, got {message.top}")
    everywhere = _EVERYWHERE.get(message.predicted_at)
    if everywhere is None:
        raise InvalidRequest(f"open.feedback.predicted_at {message.predicted_at} is unknown")
    wanted = PredictionsWanted(message.top, everywhere)
    needed = places * wanted.bytes_each
    if needed > info.max_message_bytes - messages.AROUND_BYTES:
        raise InvalidRequest(
            f"open.feedback.top: {message.top} tokens at {places} places are {needed} bytes, more"
            f" than fits into a message of {info.max_message_bytes}"
        )
    return wanted


def check_fits(wanted: StatesWanted | None, positions: int, info: common_pb2.ModelInfo) -> None:
    """Refuse hidden states of a prompt that are too many for a message.

    Args:
        wanted: of each position.
        positions: how many.
        info: of the target.

    Raises:
        InvalidRequest: how many fit.
    """
    if wanted is None:
        return
    each = len(wanted.layers) * info.hidden_size * wanted.dtype.bytes
    fitting = (info.max_message_bytes - messages.AROUND_BYTES) // each
    if positions > fitting:
        raise InvalidRequest(
            f"open.feedback.prompt_tokens may be {fitting} here, got {positions}: more hidden"
            f" states do not fit into a message of {info.max_message_bytes} bytes"
        )


def feedback_to(
    round_: int, first: int, states: Any, predictions: Predictions | None = None
) -> common_pb2.Feedback:
    """Hidden states and predictions as they travel.

    Args:
        round_: whose pass computed them.
        first: index of the first position in the text.
        states: [positions, layers, width], bfloat16 as int16; on the host. None for none.
        predictions: of the round; None for none.
    """
    message = common_pb2.Feedback(round=round_)
    if states is not None:
        little = states.astype(states.dtype.newbyteorder("<"), copy=False)
        message.first, message.positions = first, len(states)
        message.hidden = little.tobytes()
    if predictions is not None:
        message.places.extend(predictions.places)
        if predictions.weights is None:
            message.predicted_ids.extend(int(ids[0]) for ids in predictions.ids)
        else:
            rows = message.predictions
            rows.sizes.extend(len(ids) for ids in predictions.ids)
            rows.ids = b"".join(ids.astype("<u4").tobytes() for ids in predictions.ids)
            rows.weights = b"".join(own.astype("<u2").tobytes() for own in predictions.weights)
    return message


def carry_to(levels: Sequence[tuple[float, int]]) -> common_pb2.VerifierCarry | None:
    """A rule's state as it travels; None where there is none."""
    if not levels:
        return None
    return common_pb2.VerifierCarry(
        levels=[
            common_pb2.VerifierCarry.Level(log_ratio=log_ratio, count=count)
            for log_ratio, count in levels
        ]
    )
