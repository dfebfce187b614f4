"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_ADDRESS = "127.0.0.1:50050"

AddressOption = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        envvar="TANDEM_ADDRESS",
        metavar="HOST:PORT",
        help="The orchestrator to talk to.",
    ),
]
