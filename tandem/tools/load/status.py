"""The status of a failed call, as a sentence."""

from __future__ import annotations

import grpc


def sentence(code: grpc.StatusCode, details: str | None) -> str:
    """One line, whatever the service wrote."""
    return f"{code.name}: {' '.join((details or 'no details given').split())}"
