"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.tools.cli.metrics_addresses import is_endpoint

# As the help names them; to import them takes seconds, since they import torch.
RULES = "block, token, greedy_block, spectr or gbv"
DEFAULT_ADDRESS = "127.0.0.1:50050"
HTTP_ADDRESS = "127.0.0.1:8000"


def host_and_port(value: str) -> str:
    """A gRPC target that has a port, or needs none.

    Raises:
        typer.BadParameter: it has none.
    """
    if not value.startswith("unix:") and not is_endpoint(value.rpartition("/")[2]):
        raise typer.BadParameter(f"{value!r} is not HOST:PORT")
    return value


AddressOption = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        envvar="TANDEM_ADDRESS",
        metavar="HOST:PORT",
        help="Address of the orchestrator.",
        callback=host_and_port,
    ),
]


def _addresses(value: str) -> str:
    for part in value.split(","):
        host_and_port(part)
    return value


AddressesOption = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        envvar="TANDEM_ADDRESS",
        metavar="HOST:PORT,...",
        help="Address of the orchestrator; more addresses are tried if it is lost.",
        callback=_addresses,
    ),
]

_OBJECTIVE = "Objective"

SloTtftOption = Annotated[
    float,
    typer.Option(
        "--slo-ttft-ms",
        metavar="MS",
        min=0,
        help="A good text's first token comes within this time; 0: no limit.",
        rich_help_panel=_OBJECTIVE,
    ),
]
SloTpotOption = Annotated[
    float,
    typer.Option(
        "--slo-tpot-ms",
        metavar="MS",
        min=0,
        help="A good text takes at most this per further token; 0: no limit.",
        rich_help_panel=_OBJECTIVE,
    ),
]
SloLatencyOption = Annotated[
    float,
    typer.Option(
        "--slo-latency-ms",
        metavar="MS",
        min=0,
        help="A good text is complete within this time; 0: no limit.",
        rich_help_panel=_OBJECTIVE,
    ),
]
SloShareOption = Annotated[
    float,
    typer.Option(
        "--slo-share",
        metavar="X",
        min=0,
        max=1,
        help="Share of all texts that must be good.",
        rich_help_panel=_OBJECTIVE,
    ),
]
