"""The orchestrator to talk to, as options and the environment say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.failure import Misconfigured

if TYPE_CHECKING:
    from tandem.rpc.place import Place

_SECURITY = "Security"


def _file(name: str, words: str) -> typer.models.OptionInfo:
    variable = f"TANDEM_{name.removeprefix('--').replace('-', '_').upper()}"
    option: typer.models.OptionInfo = typer.Option(
        name, envvar=variable, metavar="FILE", help=words, rich_help_panel=_SECURITY
    )
    return option


CaOption = Annotated[
    Path | None, _file("--ca", "Speak by TLS only, to whom these authorities have signed (PEM).")
]
CertOption = Annotated[Path | None, _file("--cert", "Certificate to show (PEM).")]
KeyOption = Annotated[Path | None, _file("--key", "Its key (PEM).")]
TokenFileOption = Annotated[Path | None, _file("--token-file", "Holds the bearer token to show.")]
TlsNameOption = Annotated[
    str,
    typer.Option(
        "--tls-name",
        envvar="TANDEM_TLS_NAME",
        metavar="NAME",
        help="Name that the certificate has to have. Default: the address's host.",
        rich_help_panel=_SECURITY,
    ),
]
PlaintextOption = Annotated[
    bool,
    typer.Option(
        "--plaintext",
        help="Show the token without TLS to another machine, too: all on the way can read it.",
        rich_help_panel=_SECURITY,
    ),
]


@dataclass(frozen=True)
class Security:
    """What the options say beside the address."""

    ca: Path | None
    cert: Path | None
    key: Path | None
    token_file: Path | None
    tls_name: str
    plaintext: bool

    def at(self, address: str) -> Place:
        """The orchestrator at an address.

        Raises:
            Misconfigured: options do not go together, or a file is unfit.
        """
        from tandem.errors import StartupError
        from tandem.rpc.named_file import NamedFile
        from tandem.rpc.place import Place
        from tandem.rpc.plaintext import stays_here
        from tandem.rpc.tokens import read_token

        if bool(self.cert) != bool(self.key):
            raise Misconfigured("--cert and --key go together")
        if self.ca is None and (self.cert or self.tls_name):
            raise Misconfigured("--cert and --tls-name are for TLS: give --ca too")
        try:
            tls = None
            if self.ca is not None:
                # What reads certificates takes a tenth of a second to import.
                from tandem.rpc.tls import ClientTls

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
                f"the token would go to {address} without TLS, for all on the way to read; give"
                " --ca, or --plaintext where the network itself keeps others out"
            )
        return Place(address, tls, self.tls_name, token)
