"""Where services serve their metrics, as options or the environment say."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tandem.failure import Misconfigured

# Each endpoint has a thread of its own during a scrape.
_MOST_ENDPOINTS = 64
_SERVICES = ("ORCHESTRATOR", "DRAFTER", "TARGET")


def is_endpoint(text: str) -> bool:
    """Whether something is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16


def endpoints_of(given: Sequence[str] | None) -> list[str]:
    """The metrics endpoints to read.

    Raises:
        Misconfigured: there are none or too many, or one is not HOST:PORT.
    """
    names = [f"TANDEM_{service}_METRICS_LISTEN" for service in _SERVICES]
    asked = list(given or filter(None, map(os.environ.get, names)))
    if not asked:
        raise Misconfigured(
            "no metrics to look at; start the services with TANDEM_*_METRICS_LISTEN=HOST:PORT, and"
            " name those addresses here"
        )
    if len(asked) > _MOST_ENDPOINTS:
        raise Misconfigured(f"at most {_MOST_ENDPOINTS} addresses, got {len(asked)}")
    for endpoint in asked:
        if not is_endpoint(endpoint):
            raise Misconfigured(f"{endpoint!r} is not HOST:PORT")
    return asked
