"""Where services serve their metrics, as options or the environment say."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tandem.failure import Misconfigured

# Each endpoint has a thread of its own during a scrape.
_MOST_ENDPOINTS = 64
# Where `tandem up` serves metrics if these are free.
METRICS_ADDRESSES = {
    "drafter": "127.0.0.1:9464",
    "target": "127.0.0.1:9465",
    "orchestrator": "127.0.0.1:9466",
}


def variable_of_metrics(service: str) -> str:
    """The variable that says where a service serves its metrics."""
    return f"TANDEM_{service.upper()}_METRICS_LISTEN"


def is_endpoint(text: str) -> bool:
    """Whether something is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16


def endpoints_of(given: Sequence[str] | None, *, usual: bool = False) -> list[str]:
    """The metrics endpoints to read: those given, or the environment's.

    Args:
        given: HOST:PORT each.
        usual: if there are none, those of `tandem up`.

    Raises:
        Misconfigured: there are none or too many, or one is not HOST:PORT.
    """
    names = map(variable_of_metrics, METRICS_ADDRESSES)
    asked = list(given or filter(None, map(os.environ.get, names)))
    if not asked and not usual:
        raise Misconfigured(
            "no metrics to look at; start the services with TANDEM_*_METRICS_LISTEN=HOST:PORT, and"
            " name those addresses here"
        )
    asked = asked or list(METRICS_ADDRESSES.values())
    if len(asked) > _MOST_ENDPOINTS:
        raise Misconfigured(f"at most {_MOST_ENDPOINTS} addresses, got {len(asked)}")
    for endpoint in asked:
        if not is_endpoint(endpoint):
            raise Misconfigured(f"{endpoint!r} is not HOST:PORT")
    return asked
