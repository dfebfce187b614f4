"""TLS for both sides: credentials from files, renewed when the files change."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from tandem.rpc.security.certificates import KeyPair, read_authorities, read_pair
from tandem.rpc.security.files import NamedFile, WatchedFiles


@dataclass(frozen=True)
class ServerTls:
    """A server's credentials, and the clients that it accepts.

    Attributes:
        credentials: of one port; each new connection uses the files' current content.
        mutual: whether clients must present a certificate.
        clients: names allowed in clients' certificates; if empty, any certificate that our
            authorities signed is accepted.
    """

    credentials: grpc.ServerCredentials
    mutual: bool
    clients: tuple[str, ...] = ()


def server_tls(
    certificate: NamedFile,
    key: NamedFile,
    client_authorities: NamedFile | None = None,
    clients: tuple[str, ...] = (),
) -> ServerTls:
    """TLS of a server.

    Args:
        certificate: the server's, with its chain.
        key: of the certificate.
        client_authorities: authorities that sign clients' certificates; None asks for none.
        clients: see `ServerTls`.

    Raises:
        StartupError: a file is not usable; says which, and why.
    """
    files = [file for file in (certificate, key, client_authorities) if file is not None]

    def read() -> tuple[KeyPair, bytes | None]:
        authorities = read_authorities(client_authorities) if client_authorities else None
        return read_pair(certificate, key), authorities

    watched = WatchedFiles([file.path for file in files], read)
    given, first = watched.look()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Called before each handshake, in gRPC's own threads; None changes nothing."""
        nonlocal given
        version, content = watched.look()
        if version == given:
            return None
        given = version
        return _configuration(*content)

    mutual = client_authorities is not None
    credentials = grpc.dynamic_ssl_server_credentials(
        _configuration(*first),
        fetch,  # type: ignore[arg-type]  # the stubs do not allow None
        mutual,
    )
    return ServerTls(credentials, mutual, clients)


def _configuration(pair: KeyPair, authorities: bytes | None) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], authorities)


class ClientTls:
    """How a client verifies servers, and the certificate that it presents.

    A gRPC channel keeps its credentials for its life. The owner of a channel compares `version` to
    learn whether a new channel would have other credentials.

    Attributes:
        authorities: that sign servers' certificates.
        certificate: to present; None if servers ask for none.
        key: of the certificate.

    Raises:
        StartupError: a file is not usable; says which, and why.
    """

    def __init__(
        self,
        authorities: NamedFile,
        certificate: NamedFile | None = None,
        key: NamedFile | None = None,
    ) -> None:
        self.authorities, self.certificate, self.key = authorities, certificate, key
        files = [file for file in (authorities, certificate, key) if file is not None]

        def read() -> tuple[bytes, KeyPair | None]:
            pair = read_pair(certificate, key) if certificate and key else None
            return read_authorities(authorities), pair

        self._watched = WatchedFiles([file.path for file in files], read)

    @property
    def version(self) -> int:
        """Changes whenever the credentials of a new channel would."""
        return self._watched.look()[0]

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a new channel, from the files' current content."""
        authorities, pair = self._watched.look()[1]
        if pair is None:
            return grpc.ssl_channel_credentials(authorities)
        return grpc.ssl_channel_credentials(authorities, pair.key, pair.chain)
