"""What streams carry: a request of one sequence, and a response."""

from __future__ import annotations

from typing import Any, Protocol


class StepRequest(Protocol):
    """A request with a `step` oneof, of which one branch is `open` and one `close`."""

    sequence: int
    traceparent: str

    def WhichOneof(self, oneof_group: Any, /) -> Any:
        """The branch that is set."""


class StepResponse(Protocol):
    """A response with a `result` oneof, of which one branch is `ended`."""

    sequence: int

    @property
    def ended(self) -> Any:
        """Why it is over, if it is."""

    def WhichOneof(self, oneof_group: Any, /) -> Any:
        """The branch that is set."""

    def SerializeToString(self) -> bytes:
        """Encoded."""


# Of `requests` and `responses`: field 1, and its length comes first.
_LIST = 1 << 3 | 2


def listed(entry: bytes) -> bytes:
    """An encoded request or response as a stream's message, which is a list of them: to have the
    library make the list would copy the entry twice."""
    size = len(entry)
    head = bytearray((_LIST,))
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + entry
