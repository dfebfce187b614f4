"""tandem index: indexes of texts, in which a drafter looks up how texts went on."""

from __future__ import annotations

import json
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.errors import StartupError
from tandem.failure import Misconfigured
from tandem.tools.cli.display.terminal import err, out
from tandem.tools.cli.exit_codes import reported

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MIB = 1 << 20

index = typer.Typer(
    name="index",
    help="Build and list indexes of texts, for drafts by retrieval.",
    epilog=(
        "Build with [bold]tandem index build[/], then"
        " [bold]TANDEM_DRAFTER_STORES=prompt,corpus tandem up --recipe retrieval[/]."
    ),
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextmanager
def _misconfigured() -> Iterator[None]:
    with reported():
        try:
            yield
        except (StartupError, NotImplementedError) as error:  # pathlib on an absolute pattern
            raise Misconfigured(str(error)) from error


@index.command()
def build(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Folder of texts; by default Python's installed standard library.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    tokenizer: Annotated[
        Path,
        typer.Option(
            metavar="DIR|FILE",
            help="The target's tokenizer: its checkpoint's directory, or a tokenizer.json.",
        ),
    ] = Path("models/target"),
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the index; by default one for this tokenizer in the cache folder.",
        ),
    ] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Which files to read, below FOLDER. Repeatable. By default all files; of the"
            " standard library *.py.",
        ),
    ] = None,
    most_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=500_000_000,
            help="Stop reading at this many tokens. Of each, an index takes 6 bytes (8 if the"
            " vocabulary has more than 65,536 ids), and building it 40 bytes of memory.",
        ),
    ] = 50_000_000,
) -> None:
    """Index the texts of a folder by a tokenizer.

    An index at the same place is replaced when the new one is complete;
    a drafter that runs goes on with the old one until it is restarted.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from tandem.retrieval.build import build_index, check_output, text_files
    from tandem.retrieval.index import indexes_folder
    from tandem.vocabulary import vocabulary_fingerprint

    with _misconfigured():
        own = _tokenizer(tokenizer)
        own_folder = folder or Path(sysconfig.get_paths()["stdlib"])
        patterns = pattern or (["*"] if folder else ["*.py"])
        fingerprint = vocabulary_fingerprint(own.get_vocab())
        place = output or indexes_folder() / fingerprint[:16]
        check_output(place)
        began = time.monotonic()
        files = text_files(own_folder, patterns)
        columns = (
            TextColumn("{task.completed} of {task.total} files, {task.fields[tokens]:,} tokens"),
            BarColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=err, transient=True) as bar:
            task = bar.add_task("", total=len(files), tokens=0)
            about = build_index(
                files=files,
                tokenizer=own,
                output=place,
                source=own_folder.name,
                most_tokens=most_tokens,
                end_id=_end_id(tokenizer, own),
                progress=lambda taken, total, tokens: bar.update(
                    task, completed=taken, total=total, tokens=tokens
                ),
            )
        size = sum(path.stat().st_size for path in place.iterdir()) / _MIB
        out.print(
            f"{place}: {about.tokens:,} tokens of {about.files:,} files, {size:,.0f} MiB,"
            f" {time.monotonic() - began:.0f} s",
            highlight=False,
            soft_wrap=True,
        )


@index.command(name="list")
def list_() -> None:
    """List the indexes in the cache folder."""
    from tandem.retrieval.index import indexes, indexes_folder, read_about

    with _misconfigured():
        folder, found = indexes_folder(), indexes()
        for place in found:
            try:
                about = read_about(place)
            except StartupError as error:
                err.print(str(error), style="yellow", highlight=False)
                continue
            out.print(
                f"{place}: {about.tokens:,} tokens of {about.files:,} files of {about.source},"
                f" tokenizer {about.tokenizer[:12]}",
                highlight=False,
                soft_wrap=True,
            )
        if not found:
            err.print(f"no index in {folder}; build one with `tandem index build`")


def _tokenizer(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare exceptions
        raise Misconfigured(f"cannot read the tokenizer {file}: {error}") from None


def _end_id(path: Path, tokenizer: Tokenizer) -> int | None:
    """The token that ends a text; None where the checkpoint names none."""
    try:
        config = json.loads((path / "tokenizer_config.json").read_text())
        named = config.get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        return tokenizer.token_to_id(named) if isinstance(named, str) else None
    except (OSError, ValueError, AttributeError):
        return None
