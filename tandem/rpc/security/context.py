"""TLS of a server that is not gRPC's: a context that follows its files, and clients' names."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

from tandem.rpc.security.certificates import read_authorities, read_pair
from tandem.rpc.security.files import NamedFile, WatchedFiles


def server_context(
    certificate: NamedFile, key: NamedFile, client_authorities: NamedFile | None
) -> ssl.SSLContext:
    """The context of a port; each new connection uses the files' current content.

    Args:
        certificate: the server's, with its chain.
        key: of the certificate.
        client_authorities: authorities that sign clients' certificates; None asks for none.

    Raises:
        StartupError: a file is not usable; says which, and why.
    """

    def read() -> ssl.SSLContext:
        read_pair(certificate, key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(certificate.path, key.path)
            if client_authorities is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                # A session that is resumed shows no certificate, and an authority may be gone.
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.num_tickets = 0
                authorities = read_authorities(client_authorities)
                context.load_verify_locations(cadata=authorities.decode("ascii", "replace"))
        except (ssl.SSLError, OSError) as error:  # replaced between the two readings
            raise certificate.unfit(f"cannot be used: {error}") from None
        return context

    files = [file for file in (certificate, key, client_authorities) if file is not None]
    watched = WatchedFiles([file.path for file in files], read)

    def follow(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = watched.look()[1]

    port = read()
    port.sni_callback = follow
    return port


def names_in(certificate: Mapping[str, Any] | None) -> list[str]:
    """The names in a client's certificate, as gRPC has them: alternative ones, else the common one.

    Args:
        certificate: as `ssl` decodes it; None if the client showed none.
    """
    if certificate is None:
        return []
    if names := [name for _, name in certificate.get("subjectAltName", ())]:
        return names
    subject = (pair for part in certificate.get("subject", ()) for pair in part)
    return [value for key, value in subject if key == "commonName"]
