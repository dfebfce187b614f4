"""TLS of both sides: credentials from files, new ones when the files change."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from tandem.rpc.security.certificates import KeyPair, read_authorities, read_pair
from tandem.rpc.security.files import NamedFile, Watched


@dataclass(frozen=True)
class ServerTls:
    """What a server shows, and whom it lets in.

    Attributes:
        credentials: of one port; each new connection is met with what the files say then.
        mutual: clients have to show a certificate.
        clients: names that theirs may have; none means any that an authority of ours signed.
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
        certificate: its own, with those that it hangs from.
        key: of it.
        client_authorities: who signs clients' certificates; None asks clients for none.
        clients: see `ServerTls`.

    Raises:
        StartupError: which file is unfit, and how.
    """
    files = [file for file in (certificate, key, client_authorities) if file is not None]

    def read() -> tuple[KeyPair, bytes | None]:
        authorities = read_authorities(client_authorities) if client_authorities else None
        return read_pair(certificate, key), authorities

    watched = Watched([file.path for file in files], read)
    given, first = watched.look()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Called before each handshake, on gRPC's own threads; None changes nothing."""
        nonlocal given
        version, content = watched.look()
        if version == given:
            return None
        given = version
        return _configuration(*content)

    mutual = client_authorities is not None
    credentials = grpc.dynamic_ssl_server_credentials(
        _configuration(*first),
        fetch,  # type: ignore[arg-type]  # the stubs forget None
        mutual,
    )
    return ServerTls(credentials, mutual, clients)


def _configuration(pair: KeyPair, authorities: bytes | None) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.chain)], authorities)


class ClientTls:
    """How a caller knows servers, and what it shows them.

    gRPC's own client credentials are those of a channel for its life. Whoever keeps a channel
    asks here whether another one would have others.

    Attributes:
        authorities: who signs servers' certificates.
        certificate: to show; None where servers ask for none.
        key: of it.

    Raises:
        StartupError: which file is unfit, and how.
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

        self._watched = Watched([file.path for file in files], read)

    @property
    def version(self) -> int:
        """Another one than before where new credentials would differ."""
        return self._watched.look()[0]

    def credentials(self) -> grpc.ChannelCredentials:
        """For a new channel, of what the files say now."""
        authorities, pair = self._watched.look()[1]
        if pair is None:
            return grpc.ssl_channel_credentials(authorities)
        return grpc.ssl_channel_credentials(authorities, pair.key, pair.chain)
