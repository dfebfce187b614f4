"""Build an index of the texts in a folder."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tandem.errors import StartupError
from tandem.retrieval.index import (
    ABOUT,
    BIGRAMS,
    SUFFIXES,
    TOKENS,
    About,
    kind_of,
    write_about,
)
from tandem.vocabulary import vocabulary_fingerprint

# A larger file is data rather than text.
LARGEST_FILE = 1 << 20
_BATCH = 64
# Folders with what is not the folder's own text.
_OTHERS = {"site-packages", "dist-packages", "node_modules", "__pycache__", ".git"}

# (files read, files in all, tokens)
Progress = Callable[[int, int, int], None]


def text_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of a folder that may be texts, in order."""
    found = {path for pattern in patterns for path in folder.rglob(pattern)}
    return sorted(
        path
        for path in found
        if not _OTHERS.intersection(path.relative_to(folder).parts)
        and path.is_file()
        and 0 < path.stat().st_size <= LARGEST_FILE
    )


def build_index(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    output: Path,
    source: str,
    most_tokens: int,
    end_id: int | None = None,
    progress: Progress = lambda *_: None,
) -> About:
    """Write an index, in place of an older one.

    Args:
        files: that are read; one that is no UTF-8 is left out.
        tokenizer: of the target.
        output: folder of the index.
        source: name of the files' folder, for people.
        most_tokens: at which reading ends.
        end_id: a token that separates texts; None for none.
        progress: is told of each batch.

    Raises:
        StartupError: no file is a text, or the index cannot be written.
    """
    check_output(output)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocab = tokenizer.get_vocab()
    vocab_size = max(vocab.values()) + 1
    kind = kind_of(vocab_size)
    parts: list[npt.NDArray[Any]] = []
    read = 0
    tokens = 0
    for batch, taken in _texts(files):
        encoded = [each.ids for each in tokenizer.encode_batch(batch, add_special_tokens=False)]
        for ids in encoded:
            ended = ids if end_id is None else [*ids, end_id]
            parts.append(np.array(ended[: most_tokens - tokens], kind))
            tokens += len(parts[-1])
            read += 1
        progress(taken, len(files), tokens)
        if tokens >= most_tokens:
            break
    if not tokens:
        raise StartupError(f"no text in {source}: no file of UTF-8 with 1 to {LARGEST_FILE} bytes")
    return write_index(
        output, np.concatenate(parts), vocab_size, vocabulary_fingerprint(vocab), read, source
    )


def write_index(
    output: Path,
    ids: npt.NDArray[Any],
    vocab_size: int,
    tokenizer: str,
    files: int = 0,
    source: str = "",
) -> About:
    """Write the index of a sequence of ids, in place of an older one, when it is complete.

    Args:
        output: its folder.
        ids: at least one.
        vocab_size: all ids are below.
        tokenizer: fingerprint of their vocabulary.
        files: see `About`.
        source: see `About`.
    """
    held = ids.astype(kind_of(vocab_size))
    output = output.absolute()
    check_output(output)
    fresh = output.with_name(f".{output.name}.new")
    stale = output.with_name(f".{output.name}.old")
    try:
        for leftover in (fresh, stale):
            shutil.rmtree(leftover, ignore_errors=True)
        fresh.mkdir(parents=True)
        # One after the other: each takes a multiple of the ids in memory.
        sums = {
            TOKENS: _written(fresh / TOKENS, held),
            SUFFIXES: _written(fresh / SUFFIXES, suffixes_of(held)),
            BIGRAMS: _written(fresh / BIGRAMS, bigrams_of(held, vocab_size)),
        }
        about = About(
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            tokens=len(held),
            files=files,
            source=source,
            sha256=sums,
        )
        write_about(fresh, about)
        if output.exists():
            output.rename(stale)
        fresh.rename(output)
        shutil.rmtree(stale, ignore_errors=True)
    except OSError as error:
        raise StartupError(f"cannot write the index {str(output)!r}: {error.strerror}") from error
    return about


def check_output(output: Path) -> None:
    """Refuse a place that holds something else than an index.

    Raises:
        StartupError: it does.
    """
    if not output.exists():
        return
    if not output.is_dir() or (any(output.iterdir()) and not (output / ABOUT).is_file()):
        raise StartupError(
            f"{str(output)!r} is there and is no index: name another folder for the index"
        )


def _written(path: Path, content: npt.NDArray[Any]) -> str:
    """Write an array; returns the SHA-256 of its bytes."""
    content.tofile(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _texts(files: Sequence[Path]) -> Iterator[tuple[list[str], int]]:
    """Batches of texts, and how many files were looked at."""
    batch: list[str] = []
    for taken, path in enumerate(files, 1):
        try:
            batch.append(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        finally:
            last = taken == len(files)
        if len(batch) >= _BATCH or last:
            yield batch, taken
            batch = []
    if batch:
        yield batch, len(files)


def suffixes_of(ids: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Where each suffix of big-endian ids begins, in the order of the suffixes."""
    from pydivsufsort import divsufsort

    width = ids.dtype.itemsize
    starts: npt.NDArray[Any] = divsufsort(ids.view(np.uint8))
    found: npt.NDArray[np.uint32] = starts[starts % width == 0].astype(np.uint32)
    found //= np.uint32(width)
    return found


# Pairs that are counted at a time.
_PAIRS = 1 << 22


def bigrams_of(ids: npt.NDArray[Any], vocab_size: int) -> npt.NDArray[np.uint32]:
    """[vocab_size] the most frequent token after each; `vocab_size` where nothing follows."""
    pairs, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for first in range(0, len(ids) - 1, _PAIRS):
        part = ids[first : first + _PAIRS + 1].astype(np.int64)
        own, numbers = np.unique(part[:-1] * vocab_size + part[1:], return_counts=True)
        joined, places = np.unique(np.concatenate([pairs, own]), return_inverse=True)
        counts = np.bincount(places, np.concatenate([counts, numbers])).astype(np.int64)
        pairs = joined
    before, behind = pairs // vocab_size, pairs % vocab_size
    order = np.lexsort((-behind, counts, before))  # the last of each is its most frequent one
    found = np.full(vocab_size, vocab_size, np.uint32)
    found[before[order]] = behind[order]
    return found
