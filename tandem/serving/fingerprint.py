"""A service's fingerprint: two with the same one are replicas of each other."""

from __future__ import annotations

import hashlib
import json

from tandem.errors import Unavailable


def fingerprint_of(*parts: str | float) -> str:
    """SHA-256 over what determines a service's law, in hexadecimal."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def require_same(expected: str, own: str) -> None:
    """Refuse a caller who counts on another service than this one.

    Args:
        expected: fingerprint of the service that the caller knows; empty compares nothing.
        own: this service's.

    Raises:
        Unavailable: they differ.
    """
    if expected not in ("", own):
        raise Unavailable(
            f"open.fingerprint: {expected[:12]} is expected here, this service is {own[:12]};"
            " ask it again what it serves, or try another replica"
        )
