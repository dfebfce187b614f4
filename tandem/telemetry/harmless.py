"""Telemetry that fails is lost, and never the text that it is about."""

from __future__ import annotations

import logging
from types import TracebackType

# Named like OpenTelemetry's own loggers, whose lines are rate-limited.
_log = logging.getLogger("opentelemetry.tandem")


class Harmless:
    """A block whose exceptions are logged and end nothing but the block."""

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Swallow an exception; what asks to stop (a cancellation, say) passes."""
        if not isinstance(error, Exception):
            return False
        _log.warning("telemetry failed, and is lost", exc_info=error)
        return True


# It has no state, so that one does for all.
harmless = Harmless()
