"""The command line's root. Each command imports gRPC when it runs, so that help is instant."""

from __future__ import annotations

from typing import Annotated

import typer

from tandem import __version__
from tandem.tools.cli.commands.bench import bench
from tandem.tools.cli.commands.chat import chat
from tandem.tools.cli.commands.demo import demo
from tandem.tools.cli.commands.drafters.distill import distill
from tandem.tools.cli.commands.drafters.drafter import drafter
from tandem.tools.cli.commands.drafters.index import index
from tandem.tools.cli.commands.generate import generate
from tandem.tools.cli.commands.info import info
from tandem.tools.cli.commands.load import load
from tandem.tools.cli.commands.plan import plan
from tandem.tools.cli.commands.top import top
from tandem.tools.cli.commands.trace import trace
from tandem.tools.cli.commands.up import UpCommand, up

app = typer.Typer(
    name="tandem",
    help=(
        "Lossless speculative decoding: a small drafter guesses, the target decides,"
        " and the text follows exactly the target's distribution."
    ),
    epilog="Start with [bold]tandem up[/], then [bold]tandem generate 'def '[/] elsewhere.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options of the command itself; its help is above."""


app.command(cls=UpCommand)(up)
for command in (generate, chat, demo, bench, load, plan, distill, info, top):
    app.command()(command)
app.add_typer(trace)
app.add_typer(index)
app.add_typer(drafter)
