"""Errors as OpenAI's API has them: a table of HTTP statuses, and the object in a body."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tandem import errors


class _Kind(NamedTuple):
    status: int
    type: str
    code: str


_INTERNAL = _Kind(500, "server_error", "internal_error")
_BUSY = _Kind(503, "server_error", "service_unavailable")
_LATE = _Kind(504, "server_error", "deadline_exceeded")

_KINDS: dict[type[errors.TandemError], _Kind] = {
    errors.InvalidRequest: _Kind(400, "invalid_request_error", "invalid_value"),
    errors.WrongState: _Kind(409, "invalid_request_error", "wrong_state"),
    errors.Unsupported: _Kind(400, "invalid_request_error", "unsupported"),
    errors.Unauthenticated: _Kind(401, "authentication_error", "invalid_api_key"),
    errors.Forbidden: _Kind(403, "permission_error", "forbidden"),
    errors.NotFound: _Kind(404, "invalid_request_error", "not_found"),
    errors.Exhausted: _Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.Unavailable: _BUSY,
    errors.SequenceIdled: _BUSY,
    errors.SequenceGivenBack: _BUSY,
    errors.DrafterLost: _BUSY,
    errors.IdleTimeout: _Kind(408, "invalid_request_error", "client_too_slow"),
    errors.DeadlineExceeded: _LATE,
    errors.OutOfTime: _LATE,
    errors.EngineFailure: _INTERNAL,
    errors.PeerFailure: _INTERNAL,
    errors.ShortDraft: _INTERNAL,
}

# A sentence begins with the field's name, as gRPC's messages have it.
_FIELD = re.compile(r"(?:sampling\.)?(?:shaping\.)?([a-z_]+(?:\.[a-z_0-9]+)*)\b")
_NAMES = {
    "max_new_tokens": "max_tokens",
    "stop_strings": "stop",
    "prompt_token_ids": "prompt",
    "bad_strings": "bad_words",
    "chat": "messages",
    "chat.messages": "messages",
    "log_probs.prompt": "logprobs",
    "log_probs": "logprobs",
    "verifier": "tandem.verifier",
    "verifier_options": "tandem.verifier_options",
    "gamma": "tandem.gamma",
    "max_nodes": "tandem.max_nodes",
    "request_id": "x-request-id",
}
# Within a sentence, the names that are no words of plain English.
_WITHIN = re.compile(
    r"\b(?:max_new_tokens|stop_strings|prompt_token_ids|bad_strings|verifier_options|max_nodes|gamma)\b"
)
STOPPING = errors.Unavailable("the orchestrator is stopping; try again, or resume elsewhere")
UNEXPECTED = errors.EngineFailure("internal error; the service's log has the details")
# As a header counts them.
_LATER_SECONDS = 1


class InHttpWords(errors.InvalidRequest):
    """A refusal with the names of HTTP's fields for gRPC's.

    Attributes:
        field: that the sentence begins with; None for none.

    Args:
        sentence: of an `InvalidRequest`.
        own: the fields of the call for those of gRPC's that have several.
    """

    def __init__(self, sentence: str, own: Mapping[str, str] = {}) -> None:
        self.field: str | None = None
        if named := _FIELD.match(sentence):
            names, rest = {**_NAMES, **own}, sentence[named.end() :]
            if named[1] != "grammar":  # which quotes what the client wrote
                rest = _WITHIN.sub(lambda found: names[found[0]], rest)
            self.field = names.get(named[1], named[1])
            sentence = self.field + rest
        super().__init__(sentence)


class TooLarge(errors.InvalidRequest):
    """A body is larger than the service reads."""


class WrongMethod(errors.InvalidRequest):
    """A path is called with another method.

    Attributes:
        allowed: the method that it has.
    """

    def __init__(self, sentence: str, *, allowed: str = "") -> None:
        super().__init__(sentence)
        self.allowed = allowed


_KINDS[InHttpWords] = _KINDS[errors.InvalidRequest]
_KINDS[WrongMethod] = _Kind(405, "invalid_request_error", "method_not_allowed")
_KINDS[TooLarge] = _Kind(413, "invalid_request_error", "body_too_large")


def status_of(error: errors.TandemError) -> int:
    """The HTTP status that an error ends a call with."""
    return _KINDS.get(type(error), _INTERNAL).status


def body_of(error: errors.TandemError) -> dict[str, Any]:
    """What tells an error to a client."""
    kind = _KINDS.get(type(error), _INTERNAL)
    if type(error) in (errors.InvalidRequest, TooLarge):
        error = InHttpWords(str(error))
    return {
        "error": {
            "message": errors.cut(str(error)),
            "type": kind.type,
            "param": error.field if isinstance(error, InHttpWords) else None,
            "code": kind.code,
        }
    }


def headers_of(error: errors.TandemError) -> dict[str, str]:
    """When to try again, and what to send."""
    if isinstance(error, errors.Unauthenticated):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, WrongMethod):
        return {"allow": error.allowed}
    if isinstance(error, errors.Exhausted):
        return {"retry-after": str(math.ceil(error.retry_seconds or _LATER_SECONDS))}
    if status_of(error) == _BUSY.status:
        return {"retry-after": str(_LATER_SECONDS)}
    return {}
