"""How drafters and targets are dialled, as the settings say."""

from __future__ import annotations

from orchestrator.settings import OrchestratorSettings
from tandem.errors import StartupError
from tandem.rpc.dialer import Dialer
from tandem.rpc.security.files import NamedFile
from tandem.rpc.security.plaintext import check_plaintext
from tandem.settings import variable_of


def _named(name: str) -> str:
    return variable_of(OrchestratorSettings, name)


def dialers_of(settings: OrchestratorSettings) -> tuple[Dialer, Dialer]:
    """For drafters and for targets.

    Raises:
        StartupError: which setting or file is unfit, and how.
    """
    ca, cert, key = settings.peer_ca, settings.peer_cert, settings.peer_key
    for given, name, lacking in (
        (cert and not key, "peer_cert", "peer_key"),
        (key and not cert, "peer_key", "peer_cert"),
        (cert and not ca, "peer_cert", "peer_ca"),
        (settings.drafter_tls_name and not ca, "drafter_tls_name", "peer_ca"),
        (settings.target_tls_name and not ca, "target_tls_name", "peer_ca"),
    ):
        if given:
            raise StartupError(f"{_named(name)} needs {_named(lacking)} too")
    if ca is None:
        _check_plaintext(settings)
        dialer = Dialer(age_seconds=settings.peer_connection_seconds)
        return dialer, dialer
    # What reads certificates takes a tenth of a second to import.
    from tandem.rpc.security.tls import ClientTls

    tls = ClientTls(
        NamedFile(_named("peer_ca"), ca),
        NamedFile(_named("peer_cert"), cert) if cert else None,
        NamedFile(_named("peer_key"), key) if key else None,
    )
    names = settings.drafter_tls_name, settings.target_tls_name
    drafters, targets = (Dialer(tls, name, settings.peer_connection_seconds) for name in names)
    return drafters, targets


def _check_plaintext(settings: OrchestratorSettings) -> None:
    for name, addresses in (("drafters", settings.drafters), ("targets", settings.targets)):
        for address in addresses:
            check_plaintext(
                address,
                settings.peer_plaintext,
                _named(name),
                _named("peer_ca"),
                _named("peer_plaintext"),
            )
