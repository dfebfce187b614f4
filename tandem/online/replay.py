"""The texts that are learnt from, on disk: written by the service, read by the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tandem.online.kept_text import KeptText, packed, unpacked
from tandem.whole_files import writing

# Of a file: the bound of all is kept nearly, and files that a trainer holds take little memory.
_MOST_FILE_BYTES = 1 << 23


class ReplayFile(NamedTuple):
    """A file of texts.

    Attributes:
        number: ascending with time.
        texts: that it holds.
        path: of it.
    """

    number: int
    texts: int
    path: Path


class Replay:
    """A folder of texts. The oldest are removed where it grows too large, or they too old.

    Args:
        folder: is made where it is missing.
        most_bytes: of all files.
        most_seconds: age of a text.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        most_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._most_bytes, self._most_seconds = folder, most_bytes, most_seconds
        self._clock = clock

    def files(self) -> list[ReplayFile]:
        """The files, oldest first."""
        found = []
        for path in self._folder.glob("*.safetensors"):
            number, _, texts = path.stem.partition("-")
            if number.isdecimal() and texts.isdecimal():
                found.append(ReplayFile(int(number), int(texts), path))
        return sorted(found)

    def read(self, file: ReplayFile) -> list[KeptText]:
        """The texts of a file; none where it is gone or broken."""
        with suppress(OSError, SafetensorError, ValueError, KeyError):
            return unpacked(load_file(file.path))
        return []

    def add(self, texts: Sequence[KeptText]) -> None:
        """Keep texts, at least one, in files of at most 8 MiB.

        Raises:
            OSError: there is no room, or no right to write.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        number = max((file.number for file in self.files()), default=0) + 1
        for more, part in enumerate(_parts(texts)):
            with writing(self._folder / f"{number + more:08}-{len(part)}.safetensors") as fresh:
                save_file(packed(part), fresh)

    def prune(self) -> None:
        """Remove what is too old or too much, but for the newest file where only that is too much.

        Raises:
            OSError: there is no right to.
        """
        files = self.files()
        sizes = {file: self._size(file) for file in files}
        too_much = sum(sizes.values()) - self._most_bytes
        for file in files:
            old = self._age(file) > self._most_seconds
            if not old and (too_much <= 0 or file is files[-1]):
                continue
            file.path.unlink(missing_ok=True)
            too_much -= sizes[file]

    def clear(self) -> None:
        """Remove all.

        Raises:
            OSError: there is no right to.
        """
        for path in self._folder.glob("*"):
            path.unlink(missing_ok=True)

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(map(self._size, self.files()))

    def _size(self, file: ReplayFile) -> int:
        with suppress(OSError):
            return file.path.stat().st_size
        return 0

    def _age(self, file: ReplayFile) -> float:
        with suppress(OSError):
            return self._clock() - file.path.stat().st_mtime
        return 0.0


def _parts(texts: Sequence[KeptText]) -> list[list[KeptText]]:
    """Texts of a file each, in their order."""
    parts: list[list[KeptText]] = [[]]
    for text in texts:
        if parts[-1] and sum(each.bytes for each in (*parts[-1], text)) > _MOST_FILE_BYTES:
            parts.append([])
        parts[-1].append(text)
    return parts
