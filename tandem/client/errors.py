"""How a call ends that brings no text, or not all of it."""

from __future__ import annotations

import grpc

from tandem.failure import Failure


class CallFailed(Failure):
    """A call failed. The message is `STATUS: sentence`.

    Attributes:
        status: name of the gRPC status, such as "INTERNAL".
    """

    def __init__(self, sentence: str, status: str = "") -> None:
        super().__init__(sentence)
        self.status = status


class Refused(CallFailed):
    """The request cannot be served as it is; the sentence begins with the field's name."""


class Denied(CallFailed):
    """The caller has no valid token or certificate, or may not call."""


class TimedOut(CallFailed):
    """The call's own time-out passed."""


class Lost(CallFailed):
    """No orchestrator answers, or it was lost; a call may succeed a moment later, or elsewhere."""


class Overloaded(Lost):
    """Every slot is taken.

    Attributes:
        retry_seconds: how long to wait before the next attempt; None if it is unknown.
    """

    retry_seconds: float | None = None


_KINDS: dict[grpc.StatusCode, type[CallFailed]] = {
    grpc.StatusCode.INVALID_ARGUMENT: Refused,
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.UNIMPLEMENTED: Refused,
    grpc.StatusCode.NOT_FOUND: Refused,
    grpc.StatusCode.UNAUTHENTICATED: Denied,
    grpc.StatusCode.PERMISSION_DENIED: Denied,
    grpc.StatusCode.DEADLINE_EXCEEDED: TimedOut,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Lost,
    grpc.StatusCode.ABORTED: Lost,
    grpc.StatusCode.CANCELLED: Lost,
    grpc.StatusCode.UNKNOWN: Lost,  # a connection that broke, in gRPC's words
}
_PUSHBACK = "grpc-retry-pushback-ms"


def failure_of(error: grpc.RpcError) -> CallFailed:
    """A failed call as an error of ours."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return Lost(sentence(grpc.StatusCode.UNKNOWN, str(error)), "UNKNOWN")
    code = error.code()
    found = _KINDS.get(code, CallFailed)(sentence(code, error.details()), code.name)
    if isinstance(found, Overloaded):
        trailing = {str(key): value for key, value in error.trailing_metadata() or ()}
        if (pause := str(trailing.get(_PUSHBACK, ""))).isdecimal():
            found.retry_seconds = int(pause) / 1000
    return found


def sentence(code: grpc.StatusCode, details: str | None) -> str:
    """A status as one line, even if the details have several."""
    return f"{code.name}: {' '.join((details or 'no details given').split())}"


def unconnected(address: str, *, in_time: bool) -> CallFailed:
    """What a call fails with that found no server.

    Args:
        address: where it looked.
        in_time: else the call's own time-out passed before anybody could have answered.
    """
    if not in_time:
        return TimedOut(
            f"DEADLINE_EXCEEDED: the time-out passed while {address} was connected to",
            "DEADLINE_EXCEEDED",
        )
    return Lost(
        f"no orchestrator answers at {address}: start one with `tandem up`, or name another with"
        " --address",
        "UNAVAILABLE",
    )
