"""The orchestrator to talk to, as options and the environment say."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.failure import Misconfigured

if TYPE_CHECKING:
    from tandem.rpc.endpoint import Endpoint

_SECURITY = "Security"


def _file(name: str, words: str) -> typer.models.OptionInfo:
    variable = f"TANDEM_{name.removeprefix('--').replace('-', '_').upper()}"
    option: typer.models.OptionInfo = typer.Option(
        name, envvar=variable, metavar="FILE", help=words, rich_help_panel=_SECURITY
    )
    return option


_Ca = Annotated[
    Path | None, _file("--ca", "Use TLS, and trust certificates of these authorities only (PEM).")
]
_Cert = Annotated[Path | None, _file("--cert", "Client certificate to send (PEM).")]
_Key = Annotated[Path | None, _file("--key", "Private key of --cert (PEM).")]
_TokenFile = Annotated[Path | None, _file("--token-file", "File with the bearer token to send.")]
_TlsName = Annotated[
    str,
    typer.Option(
        "--tls-name",
        envvar="TANDEM_TLS_NAME",
        metavar="NAME",
        help="Name that the server's certificate must have. Default: the address's host.",
        rich_help_panel=_SECURITY,
    ),
]
_Plaintext = Annotated[
    bool,
    typer.Option(
        "--plaintext",
        help="Send the token without TLS even to another machine: anyone on the path can read it.",
        rich_help_panel=_SECURITY,
    ),
]


@dataclass(frozen=True)
class Security:
    """The security options, to be combined with an address."""

    ca: _Ca = None
    cert: _Cert = None
    key: _Key = None
    token_file: _TokenFile = None
    tls_name: _TlsName = ""
    plaintext: _Plaintext = False

    def at(self, address: str) -> Endpoint:
        """The orchestrator at an address.

        Raises:
            Misconfigured: options contradict each other, or a file is not usable.
        """
        from tandem.errors import StartupError
        from tandem.rpc.endpoint import Endpoint
        from tandem.rpc.security.files import NamedFile
        from tandem.rpc.security.plaintext import stays_here
        from tandem.rpc.security.tokens import read_token

        if bool(self.cert) != bool(self.key):
            raise Misconfigured("--cert and --key go together")
        if self.ca is None and (self.cert or self.tls_name):
            raise Misconfigured("--cert and --tls-name are for TLS: give --ca too")
        try:
            tls = None
            if self.ca is not None:
                # Importing the code that reads certificates takes a tenth of a second.
                from tandem.rpc.security.tls import ClientTls

                tls = ClientTls(
                    NamedFile("--ca", self.ca),
                    NamedFile("--cert", self.cert) if self.cert else None,
                    NamedFile("--key", self.key) if self.key else None,
                )
            token = ""
            if self.token_file is not None:
                token = read_token(NamedFile("--token-file", self.token_file))
        except StartupError as error:
            raise Misconfigured(str(error)) from None
        if token and tls is None and not self.plaintext and not stays_here(address):
            raise Misconfigured(
                f"the token would go to {address} without TLS, and anyone on the path could read"
                " it; give --ca, or --plaintext if the network itself keeps others out"
            )
        return Endpoint(address, tls, self.tls_name, token)


def secured(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of Security, which it takes as its argument `security`."""
    options = inspect.signature(Security, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)
    own = [one for name, one in signature.parameters.items() if name != "security"]

    @wraps(command)
    def with_options(**given: Any) -> None:
        command(Security(**{name: given.pop(name) for name in options}), **given)

    added = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in options.values()]
    with_options.__dict__["__signature__"] = signature.replace(parameters=[*own, *added])
    return with_options
