"""tandem distill: a drafter that learns from its target."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.distillation.allocator import keep_freed_memory
from tandem.distillation.plan import Data, Distillation, Divergence
from tandem.errors import StartupError, TandemError
from tandem.failure import Failure, Misconfigured
from tandem.tools.cli.display.terminal import err, out, tell
from tandem.tools.cli.exit_codes import reported
from tandem.tools.cli.security import Security, secured

if TYPE_CHECKING:
    from tandem.distillation.distilled import Distilled
    from tandem.distillation.run import TrainingProgress

_Target = Annotated[
    str,
    typer.Option(
        metavar="DIR|HOST:PORT",
        help="The target's checkpoint, or an orchestrator that serves it. A service tells of each"
        " place its 20 likeliest tokens, and is slower than a checkpoint here.",
    ),
]
_Drafter = Annotated[
    str,
    typer.Option(
        metavar="DIR",
        help="The drafter to begin with, of the target's tokenizer. None: a fresh one of --layers"
        " and --width.",
    ),
]
_Prompts = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help='Texts to learn from, a JSON object a line: {"text": "..."}, {"prompt": "..."} or'
        ' {"messages": [{"role": "user", "content": "..."}, ...]}. One in 50 is held out.',
    ),
]
_Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the new drafter.")]
_HeldOut = Annotated[
    str,
    typer.Option(metavar="FILE", help="Texts to measure on, instead of some of --prompts."),
]
_Divergence = Annotated[
    Divergence, typer.Option(help="Of the target's rows and the drafter's: what is made small.")
]
_Data = Annotated[
    Data,
    typer.Option(
        help="Whose texts: those of the file (corpus), the target's continuations of its prompts,"
        " the drafter's own (on-policy), or half of each of the latter two (mixed)."
    ),
]
_Minutes = Annotated[float, typer.Option(metavar="N", min=0, help="How long to train.")]
_Steps = Annotated[
    int, typer.Option(metavar="N", min=0, help="Train for this many steps instead of --minutes.")
]
_Rows = Annotated[int, typer.Option(metavar="N", min=1, help="Texts a step.")]
_Length = Annotated[int, typer.Option(metavar="N", min=8, help="Tokens of a text.")]
_Rate = Annotated[
    float,
    typer.Option(
        metavar="X", help="Largest learning rate: about 1e-2 for a fresh drafter, less for others."
    ),
]
_Layers = Annotated[int, typer.Option(metavar="N", min=0, help="Layers of a fresh drafter.")]
_Width = Annotated[
    int, typer.Option(metavar="N", min=0, help="Width of a fresh drafter: a multiple of 32.")
]
_MeasureEvery = Annotated[
    int, typer.Option(metavar="N", min=1, help="Steps between two measurements on held-out texts.")
]
_Seed = Annotated[int, typer.Option(min=0, help="Of batches and samples.")]
_Device = Annotated[
    str, typer.Option(help="Where both are computed. Default: a GPU where there is one.")
]
_Threads = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="CPU threads; 0 takes one a core. With 1, and --steps, a seed repeats its files.",
    ),
]


@contextmanager
def _explained() -> Iterator[None]:
    with reported():
        try:
            yield
        except StartupError as error:
            raise Misconfigured(str(error)) from error
        except TandemError as error:
            raise Failure(str(error)) from error
        except OSError as error:
            raise Failure(
                f"{error}. What was written before is kept, and the same command goes on"
            ) from error


@secured
def distill(
    security: Security,
    target: _Target,
    prompts: _Prompts,
    output: _Out,
    drafter: _Drafter = "",
    held_out: _HeldOut = "",
    divergence: _Divergence = "tvd",
    data: _Data = "target",
    minutes: _Minutes = 60.0,
    steps: _Steps = 0,
    rows: _Rows = 16,
    length: _Length = 512,
    rate: _Rate = 1e-3,
    layers: _Layers = 0,
    width: _Width = 0,
    measure_every: _MeasureEvery = 100,
    seed: _Seed = 0,
    device: _Device = "",
    threads: _Threads = 0,
) -> None:
    """Train a drafter on what its target says (DistillSpec, arXiv 2310.08461).

    The folder holds the best drafter so far at any moment. Ctrl-C interrupts;
    the same command goes on where it was.
    """
    if importlib.util.find_spec("transformers") is None:
        with reported():
            raise Misconfigured("distilling needs torch: pip install 'tandem-llm[distill]'")
    keep_freed_memory()
    with _explained():
        plan = Distillation(
            target=target,
            drafter=drafter,
            prompts=prompts,
            held_out=held_out,
            divergence=divergence,
            data=data,
            steps=steps,
            minutes=minutes,
            rows=rows,
            length=length,
            rate=rate,
            measure_every=measure_every,
            seed=seed,
            layers=layers,
            width=width,
        )
        plan.check()
        outcome = _run(plan, output, device, threads, security)
        _show(outcome, output)


def _run(
    plan: Distillation, output: Path, device: str, threads: int, security: Security
) -> Distilled:
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from tandem.client.blocking import Client
    from tandem.distillation.run import distill as train

    client = None
    if plan.is_served:
        places = [security.at(one) for one in plan.target.split(",")]
        client = Client.of(places, note=tell)
    common: Any = {"device": device, "threads": threads, "client": client, "say": tell}
    if not err.is_terminal:
        return train(plan, output, progress=_lines(), **common)
    columns = (
        TextColumn("step {task.fields[step]:,}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}, α {task.fields[overlap]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=1.0, step=0, loss=0.0, overlap="…")

        def progress(now: TrainingProgress) -> None:
            bar.update(
                task, completed=now.share, step=now.step, loss=now.loss, overlap=_overlap(now)
            )

        return train(plan, output, progress=progress, **common)


def _lines() -> Callable[[TrainingProgress], None]:
    """Without a terminal, a line of each measurement."""
    told = None

    def progress(now: TrainingProgress) -> None:
        nonlocal told
        if now.overlap != told:
            told = now.overlap
            left = now.seconds * (1 - now.share) / now.share / 60
            tell(f"step {now.step:,} ({now.share:.0%}, {left:.0f} min left): α {_overlap(now)}")

    return progress


def _overlap(now: TrainingProgress) -> str:
    names = {"text": "held-out text", "target": "the target's"}
    return ", ".join(f"{value:.3f} ({names[kind]})" for kind, value in now.overlap.items())


def _show(outcome: Distilled, output: Path) -> None:
    from rich.table import Table

    table = Table(box=None)
    for column in ("", "before", "after"):
        table.add_column(column)
    for row in outcome.rows():
        table.add_row(*row)
    out.print(table)
    out.print(
        f"{output}: the drafter of step {outcome.best_step:,} of {outcome.steps:,},"
        f" {outcome.seconds / 60:.1f} minutes of training",
        soft_wrap=True,
    )
    if not outcome.best_step:
        tell("no step was better than the drafter that it began with: train longer, or otherwise")
