"""tandem trace: what recorded traces say, and what a change would be worth."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tandem.failure import Misconfigured
from tandem.tools.cli.display.terminal import err, out, write_exactly
from tandem.tools.cli.exit_codes import reported

if TYPE_CHECKING:
    from tandem.tools.traces.analysis.comparison import RequestSample
    from tandem.tools.traces.read.recording import Recording

_T = TypeVar("_T")

trace = typer.Typer(
    name="trace",
    help=(
        "Read recorded traces: where the time went, what differs between two runs,"
        " what a change would gain."
    ),
    epilog=(
        "Record with [bold]tandem up --trace-dir DIR[/] or [bold]tandem demo[/],"
        " then [bold]tandem trace report DIR[/]."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Per(StrEnum):
    """What a round's stages are divided by."""

    ROUND = "round"
    TOKEN = "token"


class Format(StrEnum):
    """What can be exported."""

    PERFETTO = "perfetto"
    CSV = "csv"


_SOURCES = (
    "Files of OTLP-JSON lines, gzipped or not; folders of them; - for standard input;"
    " jaeger:http://HOST:16686 or tempo:http://HOST:3200, optionally with ?since=2h&limit=500."
)
_Paths = Annotated[list[str], typer.Argument(metavar="SOURCE...", help=_SOURCES)]
_Request = Annotated[
    str | None,
    typer.Option(
        metavar="ID", help="Only this request: its id or trace id, or the beginning of one."
    ),
]
_LOOKING = "looking at the requests"
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def recording_of(names: Sequence[str]) -> Recording:
    """Everything in the files, read with a progress bar on a terminal.

    Raises:
        Misconfigured: a file cannot be read, or none has a span of Tandem.
        Failure: there is no room for temporary files.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from tandem.tools.traces.read.recording import Recording

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("reading", total=_bytes(names))
        return Recording(names, lambda count: progress.advance(task, count))


def _bytes(names: Sequence[str]) -> int | None:
    """Bytes to read; None if unknown, as for standard input."""
    from tandem.tools.traces.read.source import STDIN, sources_of

    sources = sources_of(names)
    files = [source for source in sources if isinstance(source, Path) and source != STDIN]
    return sum(file.stat().st_size for file in files) if len(files) == len(sources) else None


@trace.command()
def report(
    paths: _Paths,
    request: _Request = None,
    expanded: Annotated[
        list[int] | None,
        typer.Option(
            "--round",
            metavar="N",
            min=0,
            help="With --request: show the inside of this round. Repeatable. Default: the longest.",
        ),
    ] = None,
    json: _Json = False,
) -> None:
    """Split the wall time of requests into stages.

    Every instant belongs to the one stage that its request waited for, so that
    the shares add up. Counts and percentiles are of a stage's time in one step,
    call, round or request. Percentiles are within 0.5 %.
    """
    from tandem.tools.traces.analysis.report import TraceReport
    from tandem.tools.traces.show import report as summary
    from tandem.tools.traces.show.waterfall import Waterfall

    with reported():
        recording = recording_of(paths)
        if request is not None:
            waterfall = Waterfall(recording.request(request), expanded or ())
            if json:
                _print_json(waterfall.as_json())
                return
            out.print(waterfall.stages())
            for line in waterfall.lines():
                out.print(line, soft_wrap=True)
            return
        if json:
            with err.status(_LOOKING):
                found = summary.as_json(TraceReport.of(recording))
            _print_json(found)
            return
        show(recording)


def show(recording: Recording) -> None:
    """Print where the wall time of recorded requests went."""
    from tandem.tools.traces.analysis.report import TraceReport
    from tandem.tools.traces.show import report as summary

    with err.status(_LOOKING):
        found = TraceReport.of(recording)
    out.print(summary.headline(found))
    for table in summary.tables(found):
        out.print(table)
    for remark in summary.remarks(found):
        out.out(remark, highlight=False)


def _print_json(found: object) -> None:
    write_exactly(json_module.dumps(found, indent=2) + "\n")


@trace.command()
def compare(
    before: Annotated[str, typer.Argument(metavar="A", help=f"A recording. {_SOURCES}")],
    after: Annotated[str, typer.Argument(metavar="B", help="Another recording.")],
    per: Annotated[
        Per, typer.Option(help="Divide times by rounds or by tokens; times per token add up.")
    ] = Per.ROUND,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the bootstrap.")] = 0,
    json: _Json = False,
) -> None:
    """Show what differs between two recordings.

    Intervals are bootstrapped over requests; in 95 of 100 comparisons all of
    them contain the true values. One that contains 0 shows no difference.
    """
    from dataclasses import asdict

    from tandem.tools.traces.analysis.comparison import Unit
    from tandem.tools.traces.analysis.comparison import compare as lines_of
    from tandem.tools.traces.show.comparison import comparison_remarks, comparison_table

    with reported():
        first, second = _sample(before, seed), _sample(after, seed)
        lines = lines_of(first, second, Unit(per.value), seed)
        if json:
            _print_json(
                {
                    "requests": [first.count, second.count],
                    "lines": [{**asdict(line), "moved": line.moved} for line in lines],
                }
            )
            return
        out.print(comparison_table(lines, before, after))
        for remark in comparison_remarks(lines, first, second):
            out.out(remark, highlight=False)


def _sample(name: str, seed: int) -> RequestSample:
    """The requests of a recording that ended well, in numbers."""
    from tandem.tools.traces.analysis.attribution import segments
    from tandem.tools.traces.analysis.comparison import RequestSample
    from tandem.tools.traces.analysis.figures import RequestFigures

    requests = recording_of([name]).finished()
    with err.status(_LOOKING):
        return RequestSample(
            (RequestFigures.of(request, segments(request)) for request in requests), seed
        )


@trace.command()
def export(
    paths: _Paths,
    format_: Annotated[Format, typer.Option("--format", "-f", help="Output format.")],
    file: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Default: standard output.")
    ] = Path("-"),
    request: _Request = None,
) -> None:
    """Write the spans for another tool: ui.perfetto.dev, or a spreadsheet."""
    from tandem.tools.traces.show import perfetto, spreadsheet

    with reported():
        recording = recording_of(paths)
        only = recording.request(request) if request is not None else None
        write = perfetto.write if format_ is Format.PERFETTO else spreadsheet.write
        if file == Path("-"):
            write(recording, only, out.file.write)
            return
        _into(file, lambda put: write(recording, only, put))


@trace.command()
def view(
    paths: _Paths,
    file: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="File of the page.")
    ] = Path("trace.html"),
    request: _Request = None,
) -> None:
    """Write one self-contained HTML page: the waterfall of each request."""
    from tandem.tools.traces.show.view import MAX_REQUESTS, write

    with reported():
        recording = recording_of(paths)
        with err.status(_LOOKING):
            only = recording.request(request) if request is not None else None
            further = _into(file, lambda put: write(recording, put, only))
        out.out(f"{file}", highlight=False)
        if further:
            out.out(f"left out: {further} x request after the first {MAX_REQUESTS}")


def _into(file: Path, write: Callable[[Callable[[str], object]], _T]) -> _T:
    """Open a file and let `write` fill it.

    Raises:
        Misconfigured: the file cannot be written.
    """
    try:
        with file.open("w", encoding="utf-8") as target:
            return write(target.write)
    except OSError as error:
        raise Misconfigured(f"cannot write {file}: {error.strerror}") from error


@trace.command("what-if")
def what_if(
    paths: _Paths,
    verifier: Annotated[
        str | None, typer.Option(metavar="NAME", help="Use only requests with this rule.")
    ] = None,
    gamma: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Use only requests with this gamma.")
    ] = None,
    json: _Json = False,
) -> None:
    """Predict what a change would gain, from recorded times and acceptances.

    Predictions start from the configuration (verifier, gamma, greedy or not)
    with the most recorded rounds. Times at other gammas are predicted best from
    a recording that has several.
    """
    from tandem.tools.traces.prediction.basis import Basis
    from tandem.tools.traces.prediction.whatif import Outlook
    from tandem.tools.traces.show.comparison import (
        outlook_headline,
        outlook_tables,
        outlook_verdict,
    )

    with reported():
        recording = recording_of(paths)
        with err.status(_LOOKING):
            outlook = Outlook(Basis(recording, verifier, gamma))
        if json:
            _print_json(outlook.as_json())
            return
        out.print(outlook_headline(outlook))
        for table in outlook_tables(outlook):
            out.print(table)
        out.print(outlook_verdict(outlook), soft_wrap=True)
        for sentence in recording.left_out.sentences():
            out.out(f"left out: {sentence}", highlight=False)
