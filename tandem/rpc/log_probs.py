"""Between what is told of tokens and its messages: `LogProbsSpec`, `LogProbs` in common.proto."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.common.v1 import common_pb2
from tandem.errors import InvalidRequest
from tandem.rpc.streams.call import SequenceCall
from tandem.speculation.request.log_probs import LogProbsGiven, LogProbsWanted, TokenLogProb

# float32 sums exceed 1 by less.
_MOST = 0.01


def given_from(info: common_pb2.ModelInfo) -> LogProbsGiven:
    """What a target of any version says that it tells."""
    return LogProbsGiven(*(getattr(info, name) for name in LogProbsGiven._fields))


def write_given(info: common_pb2.ModelInfo) -> None:
    """Say what targets of this version tell."""
    for name, value in LogProbsGiven()._asdict().items():
        setattr(info, name, value)


def wanted_from(message: common_pb2.LogProbsSpec) -> LogProbsWanted:
    """What is asked for.

    Raises:
        InvalidRequest: too many likeliest tokens.
    """
    try:
        return LogProbsWanted(message.top, message.processed, message.prompt)
    except ValueError as error:
        raise InvalidRequest(f"log_probs.{error}") from None


def wanted_to(wanted: LogProbsWanted | None) -> common_pb2.LogProbsSpec | None:
    """The same as a message; None for nothing."""
    if wanted is None:
        return None
    return common_pb2.LogProbsSpec(top=wanted.top, processed=wanted.processed, prompt=wanted.prompt)


def log_probs_to(log_probs: Sequence[TokenLogProb]) -> common_pb2.LogProbs | None:
    """What is told of tokens, as a message; None for none."""
    if not log_probs:
        return None
    top = [each for one in log_probs for each in one.top]
    return common_pb2.LogProbs(
        values=[one.value for one in log_probs],
        top_ids=[token_id for token_id, _ in top],
        top_values=[value for _, value in top],
    )


def log_probs_from(
    message: common_pb2.LogProbs,
    wanted: LogProbsWanted | None,
    tokens: tuple[int, int],
    call: SequenceCall[Any, Any],
) -> Sequence[TokenLogProb]:
    """What a target tells of tokens; nothing where nothing is wanted.

    Args:
        message: as received.
        wanted: what was asked for.
        tokens: how many they are, and the size of their vocabulary.
        call: that brought it.

    Raises:
        PeerFailure: they are not as many, or not what they should be.
    """
    if wanted is None:
        return ()
    (count, vocab_size), expect = tokens, call.expect
    values, ids, others = list(message.values), list(message.top_ids), list(message.top_values)
    expect("len(log_probs.values)", len(values), count, count)
    expect("len(log_probs.top_ids)", len(ids), 0, wanted.top * count)
    expect("max(log_probs.top_ids)", max(ids, default=0), 0, vocab_size - 1)
    if not all(value <= _MOST for value in (*values, *others)):  # nor NaN
        raise call.broken("log_probs must be at most 0")
    width = len(ids) // count if count else 0
    if not len(ids) == len(others) == width * count:
        raise call.broken("log_probs: the likeliest tokens are not as many at each place")
    tops = [
        tuple(zip(ids[i : i + width], others[i : i + width], strict=True))
        for i in range(0, len(ids), width or 1)
    ]
    return [TokenLogProb(value, tops[place] if width else ()) for place, value in enumerate(values)]
