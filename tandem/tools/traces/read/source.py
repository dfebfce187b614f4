"""Sources of traces: files, folders and standard input, plain or gzipped; or a query API."""

from __future__ import annotations

import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from tandem.failure import Misconfigured
from tandem.tools.traces.read.query import Query
from tandem.tools.traces.read.spans import Broken, Foreign, RecordedSpan, spans_of

STDIN = Path("-")
_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
# A collector writes some thousand spans a line, a few MiB; a longer line is another kind of file.
MAX_LINE_BYTES = 64 << 20
_BUFFER_BYTES = 1 << 18
# Other programs' services that are counted by name; a file may have any number of them.
_NAMED_SERVICES = 1_000


@dataclass
class LeftOut:
    """Counts of what was read and no figure includes.

    Attributes:
        malformed_lines: lines that are no OTLP-JSON.
        long_lines: lines longer than `MAX_LINE_BYTES`.
        cut_off: names of files that end within a line or a gzip stream.
        broken_spans: spans without an id, a name or times.
        foreign_spans: spans of other programs, by service.
        duplicates: spans that were read before.
        crowded_spans: spans beyond the most that are kept of one trace.
        orphans: spans whose parent is missing.
        rootless_traces: traces without their `generate`.
        failed_requests: requests that ended with an error.
        cancelled_requests: requests whose client left.
    """

    malformed_lines: int = 0
    long_lines: int = 0
    cut_off: list[str] = field(default_factory=list)
    broken_spans: int = 0
    foreign_spans: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    crowded_spans: int = 0
    orphans: int = 0
    rootless_traces: int = 0
    failed_requests: int = 0
    cancelled_requests: int = 0

    def sentences(self) -> list[str]:
        """A line for each kind that occurred."""
        services = ", ".join(name for name, _ in self.foreign_spans.most_common(3))
        if len(self.foreign_spans) > 3:
            services += f" and {len(self.foreign_spans) - 3} more"
        said = (
            (self.failed_requests, "request that failed"),
            (self.cancelled_requests, "request that was cancelled"),
            (self.rootless_traces, "incomplete trace, whose `generate` is missing"),
            (self.orphans, "span whose parent is missing"),
            (self.foreign_spans.total(), f"span of another program ({services})"),
            (self.duplicates, "span that was read twice"),
            (self.broken_spans, "span without an id, a name or sound times"),
            (self.crowded_spans, "span of a trace too large to look at"),
            (self.malformed_lines, "line that is not OTLP-JSON"),
            (self.long_lines, f"line longer than {MAX_LINE_BYTES >> 20} MiB"),
        )
        lines = [f"{count} x {what}" for count, what in said if count]
        return lines + [f"the end of {name}, which is cut off" for name in self.cut_off]


def sources_of(names: Sequence[str]) -> list[Path | Query]:
    """The sources of these names: files, folders' files in order of their names, and queries.

    Raises:
        Misconfigured: there is no such file, a folder has no trace file, or an address is wrong.
    """
    found: list[Path | Query] = []
    for name in names:
        path, query = Path(name), Query.of(name)
        if query is not None:
            found.append(query)
        elif path == STDIN:
            found.append(path)
        elif path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.name.endswith(_SUFFIXES) and p.is_file())
            if not inside:
                raise Misconfigured(f"no traces in {path}: no file ends with {_SUFFIXES[0]}")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise Misconfigured(f"no such file: {path}")
    return list(dict.fromkeys(found))


def read(
    source: Path | Query, left_out: LeftOut, advance: Callable[[int], object]
) -> Iterator[RecordedSpan]:
    """Tandem's spans of a source, in its order. Files are read a line at a time.

    Args:
        source: a file, `-` for standard input, or a query.
        left_out: counts everything that is no span of ours.
        advance: is called with the number of bytes of each read.

    Raises:
        Misconfigured: the file cannot be opened.
        Failure: the query is not answered.
    """
    if isinstance(source, Query):
        for document in source.documents(advance):
            yield from _spans(document, left_out)
    else:
        yield from _read_file(source, left_out, advance)


def _read_file(
    path: Path, left_out: LeftOut, advance: Callable[[int], object]
) -> Iterator[RecordedSpan]:
    try:
        raw: BinaryIO = sys.stdin.buffer if path == STDIN else path.open("rb")
    except OSError as error:
        raise Misconfigured(f"cannot read {path}: {error.strerror}") from error
    try:
        for line in _lines(
            io.BufferedReader(_Chunks(raw, advance), _BUFFER_BYTES), _name(path), left_out
        ):
            if line.strip():
                yield from _parsed(line, left_out)
    finally:
        if path != STDIN:
            raw.close()


def _name(path: Path) -> str:
    return "standard input" if path == STDIN else str(path)


class _Chunks(io.RawIOBase):
    """Hands on the bytes of one read, and reports their number.

    A buffered reader that reads ahead would lose those bytes when a cut file ends with an error.
    """

    def __init__(
        self, raw: BinaryIO | gzip.GzipFile, advance: Callable[[int], object] = lambda _: None
    ) -> None:
        self._raw = raw
        self._advance = advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        chunk: bytes = self._raw.read1(len(buffer))  # type: ignore[union-attr]
        buffer[: len(chunk)] = chunk
        self._advance(len(chunk))
        return len(chunk)


def _lines(stream: io.BufferedReader, name: str, left_out: LeftOut) -> Iterator[bytes]:
    """Whole lines; a last one without a newline only if it is valid JSON."""
    zipped = stream.peek(2)[:2] == b"\x1f\x8b"
    if zipped:
        stream = io.BufferedReader(_Chunks(gzip.GzipFile(fileobj=stream)), _BUFFER_BYTES)
    try:
        while line := stream.readline(MAX_LINE_BYTES):
            if line.endswith(b"\n"):
                yield line
            elif len(line) == MAX_LINE_BYTES:
                left_out.long_lines += 1
                while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
                    pass
            elif _is_json(line):
                yield line
            else:
                left_out.cut_off.append(name)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        left_out.cut_off.append(name)
    except IsADirectoryError:
        raise Misconfigured(f"cannot read {name}: it is a folder") from None


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _parsed(line: bytes, left_out: LeftOut) -> Iterator[RecordedSpan]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        left_out.malformed_lines += 1
    else:
        yield from _spans(document, left_out)


def _spans(document: object, left_out: LeftOut) -> Iterator[RecordedSpan]:
    try:
        for found in spans_of(document):
            if isinstance(found, RecordedSpan):
                yield found
            elif isinstance(found, Broken):
                left_out.broken_spans += found.count
            else:
                _count(found, left_out.foreign_spans)
    except ValueError:
        left_out.malformed_lines += 1


def _count(found: Foreign, services: Counter[str]) -> None:
    known = found.service in services or len(services) < _NAMED_SERVICES
    services[found.service if known else "others"] += found.count
