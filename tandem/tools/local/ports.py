"""Whether a port can be had."""

from __future__ import annotations

import socket

from tandem.failure import Misconfigured


def require_free(listen: str) -> None:
    """Find out in time that we cannot listen somewhere: models can take minutes to load.

    Raises:
        Misconfigured: the address is taken or not ours.
    """
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            # As gRPC does: a port that was just given up counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except (OSError, ValueError, OverflowError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise Misconfigured(
            f"cannot listen on {listen}: {reason}; choose another HOST:PORT with --listen"
        ) from None
