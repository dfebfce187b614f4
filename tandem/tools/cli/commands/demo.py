"""tandem demo: a text from the embedded pair, and what speculation buys."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.failure import Failure
from tandem.tools.cli.display.terminal import err, out
from tandem.tools.cli.exit_codes import reported

if TYPE_CHECKING:
    from tandem.client.connection import Connection
    from tandem.tools.cli.comparison import TurnResult

_SERVICES = ("orchestrator", "drafter", "target")
_MERGED = "trace.jsonl"
_SHOWN_PROMPT = "def "
# The addresses are the defaults of `up`, which prints others if these are taken.
_NEXT = """
next: `make up` (or `tandem up`) keeps the same pair running; then, in another terminal,
  open http://127.0.0.1:8000 in a browser, or
  curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "def ", "max_tokens": 40}'"""

_Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", file_okay=False, help="Folder for the trace.")
]
_Repeats = Annotated[
    int, typer.Option(metavar="N", min=1, help="Runs of each prompt; medians are shown.")
]
_Budget = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        help="Compare for at most this long; fewer texts run if time is short.",
    ),
]
_NewTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of each text.")]


def demo(
    folder: _Out = Path("out/demo"),
    repeats: _Repeats = 3,
    budget: _Budget = 60.0,
    new_tokens: _NewTokens = 64,
) -> None:
    """Start the three services on free ports, stream a text, and compare.

    The same prompts run at temperature 0 and 1, each with gamma 0 and with
    the verifiers token and block at gamma 4, taking turns. The greedy texts
    must be equal, token for token.
    """
    from tandem.client.connection import Connection
    from tandem.tools.cli.commands.trace import recording_of, show
    from tandem.tools.cli.comparison import first_difference
    from tandem.tools.cli.display.comparison import print_report
    from tandem.tools.local.pair import Pair
    from tandem.tools.local.stack import Stack, StackSettings

    # SIGTERM stops the services too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with reported():
        services = Pair().settings()
        services["orchestrator"] = {"TRACE_TEXT": "true"}
        for name in _SERVICES:
            services[name]["LISTEN"] = "127.0.0.1:0"
            services[name]["TRACE_FILE"] = str(_fresh(folder / f"{name}.jsonl"))
        _fresh(folder / _MERGED)
        stack = Stack(StackSettings(services))
        try:
            err.out("starting drafter, target and orchestrator", style="dim", highlight=False)
            with err.status("starting") as status:
                stack.start(progress=status.update)
                status.update("finding what computes the models fastest")
                stack.settle()
            with Connection(stack.endpoint("orchestrator")) as client:
                _show(client, new_tokens)
                samples = _measure(client, repeats, new_tokens, budget)
            codes = stack.drain()
        finally:
            stack.kill()
        print_report(samples)
        merged = _merge(folder)
        out.print(f"trace of the text above and of one text per method: {merged}")
        show(recording_of([str(merged)]))
        if failed := {name: code for name, code in codes.items() if code}:
            raise Failure(f"not every service ended well; exit codes: {failed}")
        if difference := first_difference(samples):
            raise Failure(f"the greedy texts differ: {difference}")
        out.print("[green]the greedy texts of gamma 0, token and block are equal, id by id[/]")
        out.out(_NEXT, highlight=False)


def _show(client: Connection, new_tokens: int) -> None:
    """Stream one text to the terminal."""
    from tandem.client.connection import sampled
    from tandem.tools.cli.display.text import render
    from tandem.tools.load.method import BLOCK

    generation = BLOCK.request(_SHOWN_PROMPT, 1.0, seed=0, new_tokens=new_tokens)
    render(_SHOWN_PROMPT, client.generate(generation, metadata=sampled(True)), has_text=True)
    out.print()


def _measure(
    client: Connection, repeats: int, new_tokens: int, budget_s: float
) -> list[TurnResult]:
    from tandem.tools.cli.comparison import compare, plan

    groups = plan(repeats)
    samples: list[TurnResult] = []
    with err.status("comparing") as status:
        for done, group in enumerate(compare(client, groups, new_tokens, budget_s), 1):
            samples += group
            progress = f"compared {done} of {len(groups)} groups of texts"
            status.update(progress)
            # Without a spinner, a line for each group shows the progress.
            if not err.is_terminal:
                err.out(progress, style="dim", highlight=False)
    return samples


def _fresh(path: Path) -> Path:
    """The path, after removing the file of an earlier run."""
    path.unlink(missing_ok=True)
    return path


def _merge(folder: Path) -> Path:
    """Join the three trace files into one."""
    merged = folder / _MERGED
    with merged.open("wb") as target:
        for name in _SERVICES:
            part = folder / f"{name}.jsonl"
            target.write(part.read_bytes())
            part.unlink()
    return merged
