"""Where orchestrators are, and how they are spoken to, as arguments of a client."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tandem.errors import StartupError
from tandem.failure import Misconfigured
from tandem.rpc.endpoint import Endpoint
from tandem.rpc.security.plaintext import stays_here

DEFAULT_ADDRESS = "127.0.0.1:50050"


def endpoints_of(
    addresses: Sequence[str],
    *,
    token: str = "",
    ca: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    server_name: str = "",
    plaintext: bool = False,
) -> list[Endpoint]:
    """Endpoints that are spoken to in one way.

    Args:
        addresses: HOST:PORT each; none is what the environment says, or where `tandem up` listens.
        token: to send with each call; empty sends none.
        ca: file with the authorities that sign the servers' certificates (PEM); None is plaintext.
        certificate: file with the client's certificate (PEM), if servers ask for one.
        key: file with its private key (PEM).
        server_name: that servers' certificates must have; empty is the address's host.
        plaintext: the token may go to another machine without TLS.

    Raises:
        Misconfigured: they contradict each other, or a file is not usable.
    """
    if bool(certificate) != bool(key):
        raise Misconfigured("certificate and key go together")
    if ca is None and (certificate or server_name):
        raise Misconfigured("certificate and server_name are for TLS: give ca too")
    tls = None
    if ca is not None:
        # Importing the code that reads certificates takes a tenth of a second.
        from tandem.rpc.security.files import NamedFile
        from tandem.rpc.security.tls import ClientTls

        try:
            tls = ClientTls(
                NamedFile("ca", Path(ca)),
                NamedFile("certificate", Path(certificate)) if certificate else None,
                NamedFile("key", Path(key)) if key else None,
            )
        except StartupError as error:
            raise Misconfigured(str(error)) from None
    named = os.environ.get("TANDEM_ADDRESS", DEFAULT_ADDRESS).split(",")
    places = list(addresses) or named
    for address in places:
        if token and tls is None and not plaintext and not stays_here(address):
            raise Misconfigured(
                f"the token would go to {address} without TLS, and anyone on the path could read"
                " it; give ca, or plaintext=True if the network itself keeps others out"
            )
    return [Endpoint(address, tls, server_name, token) for address in places]
