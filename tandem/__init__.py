"""Tandem from Python: `Client`, `AsyncClient` and `Local`, imported when they are first used.

import tandem

with tandem.Local() as client:
    print(client.generate("def main(", max_new_tokens=40))
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# A service imports this package too, and needs none of these.
_PLACES = {
    "AsyncClient": "tandem.client.asynchronous",
    "Client": "tandem.client.blocking",
    "Local": "tandem.tools.local.local",
    "GeneratedRound": "tandem.client.results",
    "GeneratedText": "tandem.client.results",
    "GeneratedToken": "tandem.client.results",
    "CallFailed": "tandem.client.errors",
    "Denied": "tandem.client.errors",
    "Lost": "tandem.client.errors",
    "Overloaded": "tandem.client.errors",
    "Refused": "tandem.client.errors",
    "TimedOut": "tandem.client.errors",
}
__all__ = [*_PLACES]  # names


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
