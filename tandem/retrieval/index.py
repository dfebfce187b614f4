"""A corpus on disk: its token ids, sorted by what follows (a suffix array), mapped into memory.

REST (He et al., arXiv 2311.08252) finds the last tokens of a text in it by two binary searches.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tandem.errors import StartupError, first_line
from tandem.retrieval.store import Continuations

ABOUT, TOKENS, SUFFIXES, BIGRAMS = "index.json", "tokens.bin", "suffixes.bin", "bigrams.bin"
_FILES = (TOKENS, SUFFIXES, BIGRAMS)
VERSION = 1


@dataclass(frozen=True)
class About:
    """What an index says of itself.

    Attributes:
        tokenizer: fingerprint of the vocabulary whose ids it has.
        vocab_size: number of these ids.
        tokens: that it holds.
        files: texts that it was built from.
        source: name of their folder.
        sha256: of each of its files, by name.
        version: of the format.
    """

    tokenizer: str
    vocab_size: int
    tokens: int
    files: int
    source: str
    sha256: dict[str, str]
    version: int = VERSION


def kind_of(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The dtype of a vocabulary's ids: big-endian, so that the order of bytes is that of ids."""
    return np.dtype(">u2" if vocab_size <= 1 << 16 else ">u4")


def indexes_folder() -> Path:
    """Where `tandem index build` keeps indexes: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tandem" / "indexes"


def find_index(path: str) -> Path:
    """The folder of an index.

    Args:
        path: its folder; "" for the only one in the cache folder.

    Raises:
        StartupError: there is none, or there are several.
    """
    if path:
        return Path(path)
    folder = indexes_folder()
    found = sorted(about.parent for about in folder.glob(f"*/{ABOUT}"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise StartupError(
            f"there is no index in {folder}: build one with `tandem index build`, or name its"
            " folder with `index`"
        )
    raise StartupError(
        f"there are {len(found)} indexes in {folder}: name the folder of one with `index`"
        " (`tandem index list` shows them)"
    )


def read_about(folder: Path) -> About:
    """What an index says of itself.

    Raises:
        StartupError: there is none, or it is none that this version can read.
    """
    try:
        about = About(**json.loads((folder / ABOUT).read_text()))
    except OSError as error:
        raise StartupError(f"no index in {str(folder)!r}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise StartupError(f"no index in {str(folder)!r}: {first_line(error)}") from error
    if about.version != VERSION:
        raise StartupError(
            f"the index {str(folder)!r} has the format {about.version}, this version reads"
            f" {VERSION}: build it anew"
        )
    return about


class Index:
    """An index that is mapped into memory. The files must not be written while it is open; to
    replace an index, put another folder in its place, as `tandem index build` does.

    Attributes:
        about: see there.

    Args:
        folder: of the index.

    Raises:
        StartupError: there is none, it is cut short, or not what was written.
    """

    def __init__(self, folder: Path) -> None:
        self.about = read_about(folder)
        kind = kind_of(self.about.vocab_size)
        self._width, self._length = kind.itemsize, self.about.tokens
        sizes = {TOKENS: self._width * self._length, SUFFIXES: 4 * self._length}
        sizes[BIGRAMS] = 4 * self.about.vocab_size
        maps = {}
        self._stamps: list[tuple[int, tuple[int, int]]] = []
        for name in _FILES:
            try:
                file = os.open(folder / name, os.O_RDONLY)
                found = os.fstat(file)
                if found.st_size != sizes[name]:
                    raise ValueError(f"{name} has {found.st_size} of {sizes[name]} bytes")
                maps[name] = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
                if hashlib.sha256(maps[name]).hexdigest() != self.about.sha256.get(name):
                    raise ValueError(f"{name} is not what was written")
            except (OSError, ValueError) as error:
                raise StartupError(
                    f"the index {str(folder)!r} cannot be used: {first_line(error)}; build it anew"
                ) from error
            self._stamps.append((file, (found.st_size, found.st_mtime_ns)))
        self._bytes = maps[TOKENS]
        self._tokens = np.frombuffer(self._bytes, kind)
        self._suffixes = np.frombuffer(maps[SUFFIXES], np.uint32)
        self._starts = memoryview(maps[SUFFIXES]).cast("I")  # the same, and faster one by one
        self.bigrams = np.frombuffer(maps[BIGRAMS], np.uint32)

    @property
    def unchanged(self) -> bool:
        """Whether the files are those that were opened: reading a file that was cut short would
        end the process."""
        return all(
            (now.st_size, now.st_mtime_ns) == stamp
            for now, stamp in ((os.fstat(file), stamp) for file, stamp in self._stamps)
        )

    def find(self, token_ids: Sequence[int]) -> range:
        """The places of the suffix array that begin with token ids; empty where none does."""
        wanted = b"".join(token_id.to_bytes(self._width, "big") for token_id in token_ids)
        width, size, held = self._width, len(wanted), self._bytes
        starts = self._starts

        def beginning(place: int) -> bytes:
            start = starts[place] * width
            return held[start : start + size]

        places = range(self._length)
        first = bisect_left(places, wanted, key=beginning)
        if first == self._length or beginning(first) != wanted:
            return range(0)
        return range(first, bisect_right(places, wanted, lo=first, key=beginning))

    def behind(self, places: range, length: int, depth: int, most: int) -> Continuations:
        """[at most `most`, depth] what follows a match, evenly over its places.

        Args:
            places: of the suffix array.
            length: of the match, in tokens.
            depth: tokens that are read.
            most: occurrences that are read.
        """
        count = min(len(places), most)
        chosen = places.start + np.arange(count) * len(places) // count
        at = self._suffixes[chosen].astype(np.int64)[:, None] + length + np.arange(depth)
        inside = at < self._length
        return np.where(inside, self._tokens[np.where(inside, at, 0)].astype(np.int64), -1)


def write_about(folder: Path, about: About) -> None:
    """Write what an index says of itself."""
    (folder / ABOUT).write_text(json.dumps(asdict(about), indent=2) + "\n")
