"""Messages that are kept, one file a surface: each that fuzzing found, and one for each answer.

A line is the status that the message gets and the message in base64. FOUND is the status of those
that were answered as they may not be: they may get any that is allowed.
"""

from __future__ import annotations

import base64
from pathlib import Path

FOUND = "FOUND"
_FOLDER = Path(__file__).parent / "corpus"


def surfaces() -> set[str]:
    """Names of the surfaces that have some."""
    return {path.stem for path in _FOLDER.glob("*.txt")}


def kept_of(surface: str) -> list[tuple[str, bytes]]:
    """Statuses and messages of a surface."""
    parts = [line.partition(" ") for line in _lines(surface)]
    return [(status, base64.b64decode(data)) for status, _, data in parts]


def keep(surface: str, status: str, data: bytes) -> str:
    """Keep a message; the beginning of its line, to find it by."""
    line = f"{status.replace(' ', '_')} {base64.b64encode(data).decode()}"
    lines = sorted({*_lines(surface), line})
    (_FOLDER / f"{surface}.txt").write_text("".join(f"{line}\n" for line in lines))
    return f"{surface}.txt: {line[:40]}"


def _lines(surface: str) -> list[str]:
    path = _FOLDER / f"{surface}.txt"
    return path.read_text().splitlines() if path.exists() else []
