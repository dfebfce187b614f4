"""Who may call: bearer tokens, names in certificates, and pages of which origins."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers

from orchestrator.settings import OrchestratorSettings
from tandem.errors import Forbidden
from tandem.rpc.security.plaintext import host_of
from tandem.rpc.security.tokens import BearerTokens
from tandem.telemetry.logs import bind_caller


class Access:
    """Admits calls.

    Args:
        settings: origins, names in certificates, and the header that names a client.
        tokens: a call must bring one of these; None asks for none.
    """

    def __init__(self, settings: OrchestratorSettings, tokens: BearerTokens | None) -> None:
        self._tokens = tokens
        self._clients = frozenset(settings.tls_clients)
        self._client_header = settings.client_header
        self._origins = frozenset(settings.http_origins)

    def admit(self, headers: Headers, names: Sequence[str]) -> str:
        """The caller's name, for fair shares; empty if it has none.

        Args:
            headers: of the call.
            names: in the client's certificate; none if it showed none.

        Raises:
            Forbidden: a page of another origin called, or no name may call.
            Unauthenticated: there is no valid token.
        """
        # A page of any site can have a browser post here; it is held to what the setting permits.
        origin = headers.get("origin")
        if origin is not None and not self._is_known(origin, headers.get("host", "")):
            raise Forbidden(
                "pages of this origin may not call; TANDEM_ORCHESTRATOR_HTTP_ORIGINS permits them"
            )
        if self._clients:
            names = [name for name in names if name in self._clients]
            if not names:
                raise Forbidden("the client's certificate has no name that may call here")
        if self._tokens is not None:
            known = self._tokens.owner_of(headers.getlist("authorization"))
        elif names:
            known = names[0]
        else:
            return headers.get(self._client_header, "") if self._client_header else ""
        bind_caller(known)
        return known

    def _is_known(self, origin: str, host: str) -> bool:
        # A name can be made to lead here by its owner; an address cannot.
        own = origin.partition("://")[2] == host and _is_address(host)
        return own or origin in self._origins or "*" in self._origins


def _is_address(host: str) -> bool:
    name = host_of(host) if host.rpartition(":")[2].isdecimal() else host.strip("[]")
    if name == "localhost":
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
