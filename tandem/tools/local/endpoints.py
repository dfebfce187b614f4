"""How we reach our services, with TLS if they ask for it: as their own clients do."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import StartupError
from tandem.failure import Misconfigured
from tandem.rpc.endpoint import Endpoint
from tandem.rpc.security.files import NamedFile

if TYPE_CHECKING:
    from tandem.rpc.security.tls import ClientTls


_PEERS = "TANDEM_ORCHESTRATOR_PEER_"
_FILES = ("CA", "CERT", "KEY")
_claims: list[socket.socket] = []


def endpoint_of(
    name: str, address: str, own: Mapping[str, str], orchestrator: Mapping[str, str]
) -> Endpoint:
    """The endpoint of a service of ours.

    A drafter or a target is reached with the orchestrator's PEER_* settings, the orchestrator
    with TANDEM_CA and the like, as by the commands.

    Args:
        name: of the service.
        address: of the service.
        own: the service's settings, without their prefix.
        orchestrator: the orchestrator's settings.

    Raises:
        Misconfigured: the service asks for TLS and no authority is set; or a file is not usable.
    """
    try:
        if name != "orchestrator":
            if "TLS_CERT" not in own:
                return Endpoint(address)
            tls = _tls(_PEERS, [orchestrator.get(f"PEER_{key}", "") for key in _FILES])
            return Endpoint(address, tls, orchestrator.get(f"{name.upper()}_TLS_NAME", ""))
        token = ""
        if "TOKEN_FILE" in own and (file := os.environ.get("TANDEM_TOKEN_FILE")):
            from tandem.rpc.security.tokens import read_token

            token = read_token(NamedFile("TANDEM_TOKEN_FILE", Path(file)))
        if "TLS_CERT" not in own:
            return Endpoint(address, token=token)
        tls = _tls("TANDEM_", [os.environ.get(f"TANDEM_{key}", "") for key in _FILES])
        return Endpoint(address, tls, os.environ.get("TANDEM_TLS_NAME", ""), token)
    except StartupError as error:
        raise Misconfigured(str(error)) from None


def _tls(prefix: str, paths: list[str]) -> ClientTls:
    """TLS from three variables, of which the first must be set."""
    ca, cert, key = (
        NamedFile(f"{prefix}{name}", Path(path)) if path else None
        for name, path in zip(_FILES, paths, strict=True)
    )
    if ca is None:
        raise Misconfigured(f"a service asks for TLS: set {prefix}CA too, to verify it by")
    # Importing the code that reads certificates takes a tenth of a second.
    from tandem.rpc.security.tls import ClientTls

    return ClientTls(ca, cert, key)


def free_or_other(listen: str, given: Collection[str] = ()) -> str:
    """An address, or another port of its host where it is taken, or was returned to a process that
    still runs: its service may not listen yet.

    Args:
        listen: the address.
        given: addresses that others will take.
    """
    host, _, port = listen.rpartition(":")
    if port in {one.rpartition(":")[2] for one in given}:
        return f"{host}:0"
    try:
        require_free(listen)
    except Misconfigured:
        return f"{host}:0"
    return listen if _claim(listen) else f"{host}:0"


def _claim(listen: str) -> bool:
    """Keep an address from other callers until this process ends; False where one of them has it.

    A name of Linux's abstract sockets is taken by one process at a time, and is given back with it.
    """
    if sys.platform != "linux":
        return True
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0tandem {listen}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def require_free(listen: str, option: str = "--listen") -> None:
    """Check early that an address is free: models can take minutes to load.

    Args:
        listen: the address.
        option: that chooses it.

    Raises:
        Misconfigured: the address is taken or not one of this machine.
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
            f"cannot listen on {listen}: {reason}; choose another HOST:PORT with {option}"
        ) from None
