"""Errors to gRPC statuses, and a peer's statuses to errors: two tables."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
import structlog
from google.rpc import error_details_pb2, status_pb2

from tandem import errors
from tandem.common.v1 import common_pb2

_log = structlog.get_logger(__name__)

_CODES: dict[type[errors.TandemError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.WrongState: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.SequenceIdled: grpc.StatusCode.UNAVAILABLE,
    errors.SequenceGivenBack: grpc.StatusCode.UNAVAILABLE,
    errors.DrafterLost: grpc.StatusCode.UNAVAILABLE,
    errors.IdleTimeout: grpc.StatusCode.ABORTED,
    errors.OutOfRoom: grpc.StatusCode.ABORTED,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.OutOfTime: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.EngineFailure: grpc.StatusCode.INTERNAL,
    errors.PeerFailure: grpc.StatusCode.INTERNAL,
    errors.ShortDraft: grpc.StatusCode.INTERNAL,
}

# Told to a client where a peer without room was the last to ask: it says not how long it will last.
_RETRY_SECONDS = 1.0
# gRPC's own INTERNAL: of a call that lost its connection before its status came.
_CUT_OFF = "Internal error from Core"
# Of whatever is unexpected.
INTERNAL_ERROR = "internal error; the service's log has the details"

# What a peer's status means to our own caller. The rest is a PeerFailure: a peer that finds our
# message malformed or out of turn has found a bug of ours, or of its own, and not our caller's.
_PEER_ERRORS: dict[grpc.StatusCode, tuple[type[errors.TandemError], str]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        errors.Exhausted,
        "has no free place; try again later, with backoff",
    ),
    grpc.StatusCode.UNAVAILABLE: (errors.Unavailable, "is not available; try again"),
    grpc.StatusCode.ABORTED: (errors.SequenceIdled, "ended an idle sequence; try again"),
    # Only a peer whose drain is over cancels a call of ours.
    grpc.StatusCode.CANCELLED: (errors.Unavailable, "has stopped; try again"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (
        errors.DeadlineExceeded,
        "did not answer before the deadline",
    ),
}

_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


@asynccontextmanager
async def status_boundary(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turn errors inside the block into a status; whatever is unexpected into INTERNAL."""
    try:
        yield
    except errors.TandemError as error:
        if notes := notes_of(error):
            _log.warning("a peer failed", error=str(error), notes=notes)
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        _log.exception("unexpected error in a handler")
        await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_ERROR)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.TandemError) -> NoReturn:
    """End an RPC with the error's status and sentence, and with when to try again."""
    code, sentence = code_of(error), errors.cut(str(error))
    seconds = error.retry_seconds if isinstance(error, errors.Exhausted) else None
    trailing = () if seconds is None else _retry_metadata(code, sentence, seconds)
    try:
        await context.abort(code, sentence, trailing)
    except grpc.aio.InternalError:  # a write hangs, and no status goes out after it
        # gRPC takes no AbortError but its own, which it keeps. This ends the call in silence.
        raise asyncio.CancelledError from None


def _retry_metadata(
    code: grpc.StatusCode, sentence: str, seconds: float
) -> tuple[tuple[str, str | bytes], ...]:
    """For clients that read google.rpc.RetryInfo, and for gRPC's own retries."""
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromNanoseconds(int(1e9 * seconds))
    status = status_pb2.Status(code=code.value[0], message=sentence)
    status.details.add().Pack(info)
    return (
        ("grpc-status-details-bin", status.SerializeToString()),
        ("grpc-retry-pushback-ms", str(math.ceil(1000 * seconds))),
    )


def code_of(error: errors.TandemError) -> grpc.StatusCode:
    """The status that an error ends a call with."""
    return _CODES.get(type(error), grpc.StatusCode.INTERNAL)


def end_of(error: errors.TandemError | None) -> common_pb2.SequenceEnd:
    """A sequence's end, in order or with an error's status and sentence."""
    if error is None:
        return common_pb2.SequenceEnd()
    code: int = code_of(error).value[0]
    given_back = isinstance(error, errors.OutOfRoom)
    return common_pb2.SequenceEnd(code=code, sentence=errors.cut(str(error)), given_back=given_back)


def ended_by_peer(role: str, address: str, end: common_pb2.SequenceEnd) -> errors.TandemError:
    """The error that a sequence's end stands for, where it was not asked for; see `from_peer`."""
    if not end.given_back:
        return from_peer(role, address, _BY_NUMBER.get(end.code), end.sentence)
    error = errors.SequenceGivenBack(f"the {role} has no room for the text; try again")
    error.add_note(f"{role} {address}: {end.sentence}")
    return error


def from_peer(
    role: str, address: str, code: grpc.StatusCode | None, details: str | None
) -> errors.TandemError:
    """The error that a failed call of ours stands for.

    Its sentence may go to our own caller, so it says nothing that a peer or gRPC wrote: that
    names internal addresses, and fields that the caller never sent. A note has it, for the log.

    Args:
        role: "drafter" or "target", for the sentence.
        address: of the peer, for the note.
        code: the call's status; None where there is none.
        details: the status's sentence.
    """
    if code is grpc.StatusCode.INTERNAL and details == _CUT_OFF:
        code = grpc.StatusCode.UNAVAILABLE
    name = code.name if code else "no status"
    failed = (errors.PeerFailure, f"failed ({name}); the log has the details")
    kind, sentence = _PEER_ERRORS.get(code, failed) if code else failed
    error = kind(f"the {role} {sentence}")
    if isinstance(error, errors.Exhausted):
        error.retry_seconds = _RETRY_SECONDS
    error.add_note(f"{role} {address}: {name}: {details or 'no details'}")
    return error


def notes_of(error: BaseException) -> str:
    """What is known of an error beyond its sentence, for the log."""
    return "; ".join(getattr(error, "__notes__", ()))
