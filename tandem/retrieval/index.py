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
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem.errors import StartupError, first_line
from tandem.retrieval.store import Continuations

ABOUT, TOKENS, SUFFIXES, BIGRAMS = "index.json", "tokens.bin", "suffixes.bin", "bigrams.bin"
VERSION = 1
# Suffixes are numbered in 32 bits, by a sort that works on bytes.
MOST_TOKENS = (1 << 31) // 4 - 1


class About(BaseModel):
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

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    tokenizer: str
    vocab_size: Annotated[int, Field(ge=1, le=1 << 31)]
    tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    files: int
    source: str
    sha256: dict[str, str]
    version: int = VERSION

    @property
    def fingerprint(self) -> str:
        """Of what it holds, 64 characters."""
        sums = json.dumps(sorted(self.sha256.items()))
        return hashlib.sha256(sums.encode()).hexdigest()


def kind_of(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The dtype of a vocabulary's ids: big-endian, so that the order of bytes is that of ids."""
    return np.dtype(">u2" if vocab_size <= 1 << 16 else ">u4")


def indexes_folder() -> Path:
    """Where `tandem index build` keeps indexes: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tandem" / "indexes"


def indexes() -> list[Path]:
    """Folders of the cache folder's indexes."""
    found = indexes_folder().glob(f"*/{ABOUT}")
    return sorted(about.parent for about in found if not about.parent.name.startswith("."))


def find_index(path: str) -> Path:
    """The folder of an index.

    Args:
        path: its folder; "" for the only one in the cache folder.

    Raises:
        StartupError: there is none, or there are several.
    """
    if path:
        return Path(path).expanduser()
    found, folder = indexes(), indexes_folder()
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
        said = json.loads((folder / ABOUT).read_text())
        version = said.get("version")
        if version == VERSION:
            return About.model_validate(said)
    except OSError as error:
        raise StartupError(f"no index in {str(folder)!r}: {error.strerror}") from error
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise StartupError(f"no index in {str(folder)!r}: {place}: {fault['msg']}") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise StartupError(f"no index in {str(folder)!r}: {first_line(error)}") from error
    raise StartupError(
        f"the index {str(folder)!r} has the format {version}, this version reads {VERSION}: build"
        " it again"
    )


class Index:
    """An index that is mapped into memory. The files must not be written while it is open; to
    replace an index, put another folder in its place, as `tandem index build` does.

    Attributes:
        about: what its files say of it.

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
        self._files: list[tuple[int, tuple[int, int]]] = []
        try:
            maps = {name: self._map(folder / name, size) for name, size in sizes.items()}
        except (OSError, ValueError) as error:
            self.close()
            raise StartupError(
                f"the index {str(folder)!r} cannot be used: {first_line(error)}; build it again"
            ) from error
        self._bytes = maps[TOKENS]
        self._tokens = np.frombuffer(self._bytes, kind)
        self._suffixes = np.frombuffer(maps[SUFFIXES], np.uint32)
        self._starts = memoryview(maps[SUFFIXES]).cast("I")  # the same, and faster one by one
        self.bigrams = np.frombuffer(maps[BIGRAMS], np.uint32)

    def _map(self, path: Path, size: int) -> mmap.mmap:
        """A file in memory, if it is what was written.

        Raises:
            ValueError: it is not.
        """
        file = os.open(path, os.O_RDONLY)
        found = os.fstat(file)
        self._files.append((file, (found.st_size, found.st_mtime_ns)))
        if found.st_size != size:
            raise ValueError(f"{path.name} has {found.st_size} of {size} bytes")
        mapped = mmap.mmap(file, 0, access=mmap.ACCESS_READ)
        if hashlib.sha256(mapped).hexdigest() != self.about.sha256.get(path.name):
            raise ValueError(f"{path.name} is not what was written")
        return mapped

    def close(self) -> None:
        """Close the files; nothing may be read any more."""
        while self._files:
            os.close(self._files.pop()[0])

    @property
    def unchanged(self) -> bool:
        """Whether the files are those that were opened: reading a file that was cut short would
        end the process."""
        return all(
            (now.st_size, now.st_mtime_ns) == stamp
            for now, stamp in ((os.fstat(file), stamp) for file, stamp in self._files)
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
    (folder / ABOUT).write_text(about.model_dump_json(indent=2) + "\n")
