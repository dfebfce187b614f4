"""TLS of a service's server, from its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.errors import StartupError
from tandem.rpc.security.files import NamedFile
from tandem.rpc.security.plaintext import check_plaintext
from tandem.settings import ServiceSettings, variable_of

if TYPE_CHECKING:
    from ssl import SSLContext

    from tandem.rpc.security.tls import ServerTls


def context_of(settings: ServiceSettings, listen: str, setting: str) -> SSLContext | None:
    """TLS of another port of a service; None if it serves plaintext, and may.

    Args:
        settings: of the service, whose own port is known to be good.
        listen: the port's address.
        setting: that has it.

    Raises:
        StartupError: the address is beyond this machine, and there is no certificate.
    """

    def named(name: str) -> str:
        return variable_of(type(settings), name)

    cert, key, ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    if cert is None or key is None:
        instead = f"{named('tls_cert')} and {named('tls_key')}"
        check_plaintext(listen, settings.plaintext, named(setting), instead, named("plaintext"))
        return None
    from tandem.rpc.security.context import server_context

    return server_context(
        NamedFile(named("tls_cert"), cert),
        NamedFile(named("tls_key"), key),
        NamedFile(named("tls_client_ca"), ca) if ca else None,
    )


def tls_of(settings: ServiceSettings) -> ServerTls | None:
    """TLS of a service; None if it serves plaintext, and may.

    Raises:
        StartupError: a setting or a file is not usable; says which, and why.
    """
    cert, key, ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca

    def named(name: str) -> str:
        return variable_of(type(settings), name)

    if cert is None or key is None:
        for given, name, lacking in (
            (cert, "tls_cert", "tls_key"),
            (key, "tls_key", "tls_cert"),
            (ca, "tls_client_ca", "tls_cert"),
            (settings.tls_clients, "tls_clients", "tls_client_ca"),
        ):
            if given:
                raise StartupError(f"{named(name)} needs {named(lacking)} too")
        instead = f"{named('tls_cert')} and {named('tls_key')}"
        check_plaintext(
            settings.listen, settings.plaintext, named("listen"), instead, named("plaintext")
        )
        return None
    if settings.tls_clients and ca is None:
        raise StartupError(f"{named('tls_clients')} needs {named('tls_client_ca')} too")
    # Importing the code that reads certificates takes a tenth of a second.
    from tandem.rpc.security.tls import server_tls

    return server_tls(
        NamedFile(named("tls_cert"), cert),
        NamedFile(named("tls_key"), key),
        NamedFile(named("tls_client_ca"), ca) if ca else None,
        settings.tls_clients,
    )
