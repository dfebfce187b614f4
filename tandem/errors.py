"""What can go wrong, as the services see it. `rpc.status` maps each to its gRPC status.

TandemError
├── InvalidRequest     a field is out of range; retrying cannot help
├── WrongState         a well-formed message at the wrong time
├── Unsupported        a mode this service does not have
├── Unauthenticated    the caller has not proved who it is
├── Forbidden          the caller is known, and may not
├── NotFound           there is no such thing here
├── Exhausted          every place is taken; later may help
├── Unavailable        the service, or one it needs, is not there; another may be
│   └── DrafterLost    the drafter of a text that cannot go on without it
├── IdleTimeout        a stream without a message for too long
├── OutOfRoom          a sequence was given back, for its memory was needed
├── DeadlineExceeded   the request's deadline passed
├── EngineFailure      the model or the device failed
├── PeerFailure        a service we need failed, or broke the contract
│   └── ShortDraft     a draft is shorter than the text's rule needs it
└── StartupError       the service cannot start as configured (exit code 2)
"""

from __future__ import annotations


class TandemError(Exception):
    """Root of the tree. The message is a sentence that says what to do."""


class InvalidRequest(TandemError):
    """A malformed message; the sentence begins with the field's name."""


class WrongState(TandemError):
    """A well-formed message that does not follow from what came before."""


class Unsupported(TandemError):
    """A mode that this service does not have."""


class Unauthenticated(TandemError):
    """The caller has not proved who it is; the sentence says what to send."""


class Forbidden(TandemError):
    """The caller is known, and may not call."""


class NotFound(TandemError):
    """What was asked for does not exist here."""


class Exhausted(TandemError):
    """A bound is reached.

    Attributes:
        retry_seconds: how long to wait before the next attempt; None if it is unknown.
    """

    def __init__(self, sentence: str, *, retry_seconds: float | None = None) -> None:
        super().__init__(sentence)
        self.retry_seconds = retry_seconds


class Unavailable(TandemError):
    """A service is starting, stopping or gone."""


class SequenceIdled(Unavailable):
    """A service ended a sequence of ours that was silent; it has not failed itself."""


class DrafterLost(Unavailable):
    """The drafter failed, of a text whose rule needs every draft of it."""


class SequenceGivenBack(SequenceIdled):
    """A service ended a sequence of ours for its memory, before it began the step it was asked for;
    the text goes on where it is, as soon as there is room."""


class OutOfRoom(TandemError):
    """An older sequence needed the memory of this one."""


class IdleTimeout(TandemError):
    """A stream's client has been silent for longer than the idle limit."""


class DeadlineExceeded(TandemError):
    """The request's deadline passed."""


class OutOfTime(DeadlineExceeded):
    """The text's own deadline passed while a service was waited for, which has not failed."""


class EngineFailure(TandemError):
    """The engine failed; not the caller's fault."""


class PeerFailure(TandemError):
    """A service we need failed, or answered what it must not; not the caller's fault."""


class ShortDraft(PeerFailure):
    """A draft is shorter than the text's rule needs it; its drafter is not lost."""


class StartupError(TandemError):
    """The service cannot start as configured."""


# A status travels in a header; beyond the limit of headers its very code would be lost.
MAX_SENTENCE = 500


def cut(sentence: str) -> str:
    """A sentence as it may leave the process: it can quote what a caller sent."""
    return sentence if len(sentence) <= MAX_SENTENCE else f"{sentence[: MAX_SENTENCE - 1]}…"


def first_line(error: BaseException) -> str:
    """Of an error's message, for a sentence of ours: libraries write pages. A line that ends with a
    colon goes on with the next; an empty message is the error's kind."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    ends = (place for place, line in enumerate(lines, 1) if not line.endswith(":"))
    return " ".join(lines[: next(ends, len(lines))]) or type(error).__name__
