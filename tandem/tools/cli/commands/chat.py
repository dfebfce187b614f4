"""tandem chat: a conversation with the target."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.tools.cli.display.terminal import err, out
from tandem.tools.cli.exit_codes import reported
from tandem.tools.cli.options import DEFAULT_ADDRESS, AddressesOption
from tandem.tools.cli.security import Security, secured
from tandem.tools.cli.text_options import (
    GammaOption,
    MaxNewTokensOption,
    NoLearnOption,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)

if TYPE_CHECKING:
    from tandem.client.blocking import Client
    from tandem.client.options import Options
    from tandem.orchestrator.v1 import orchestrator_pb2 as pb

_System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="What the model is told before all else.")
]
_HELP = "/reset forgets what was said, /quit (or Ctrl-D) ends, Ctrl-C stops an answer"


@secured
def chat(
    security: Security,
    address: AddressesOption = DEFAULT_ADDRESS,
    system: _System = None,
    temperature: TemperatureOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    gamma: GammaOption = None,
    no_learn: NoLearnOption = False,
) -> None:
    """Talk with the target, by its chat template, with the colours of generate.

    Without a terminal each line of standard input is a message, and the answers are plain text.
    """
    from tandem.client.blocking import Client

    options: Options = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "gamma": gamma,
        "learn": False if no_learn else None,
    }
    with reported():
        places = [security.at(one) for one in address.split(",")]
        with Client.of(places, note=lambda sentence: err.out(f"tandem: {sentence}")) as client:
            client.info()  # before anything is typed
            if sys.stdin.isatty():
                err.out(_HELP, style="dim", highlight=False)
            _talk(client, options, system)


def _talk(client: Client, options: Options, system: str | None) -> None:
    """Answer message by message; an answer that was stopped, or failed, is forgotten with its
    question."""
    from tandem.client.errors import CallFailed, Lost
    from tandem.client.options import generation_of
    from tandem.tools.cli.display.text import render

    start = [] if system is None else [{"role": "system", "content": system}]
    said, legend = list(start), True
    for line in _lines():
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            said = list(start)
            continue
        if not line.strip():
            continue
        asked = [*said, {"role": "user", "content": line}]
        parts: list[str] = []
        try:
            events = client.events(generation_of(asked, options))
            render("", _kept(events, parts), has_text=True, legend=legend)
        except KeyboardInterrupt:
            err.out("stopped; the question is forgotten", style="dim", highlight=False)
            continue
        except CallFailed as failure:
            if isinstance(failure, Lost) or not sys.stdin.isatty():
                raise
            err.out(f"tandem: {failure}", style="red", highlight=False)
            continue
        legend = False
        said = [*asked, {"role": "assistant", "content": "".join(parts)}]


def _kept(events: Iterator[pb.GenerateResponse], parts: list[str]) -> Iterator[pb.GenerateResponse]:
    """A text's messages; what they release is kept."""
    for event in events:
        parts += [token.text for token in event.round.tokens]
        yield event


def _lines() -> Iterator[str]:
    """What is typed, with the terminal's own editing and history."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  # gives `input` both

    while True:
        out.print()
        try:
            yield input("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            out.print()
