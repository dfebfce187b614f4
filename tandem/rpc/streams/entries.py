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
