"""An index finds what a plain search finds, and refuses files that are not what was written."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from tandem.errors import StartupError
from tandem.retrieval.build import write_index
from tandem.retrieval.corpus import BigramStore, CorpusStore, OpenIndex
from tandem.retrieval.index import (
    ABOUT,
    BIGRAMS,
    SUFFIXES,
    TOKENS,
    Index,
    find_index,
    indexes_folder,
)
from tandem.retrieval.store import TextStore


def written(folder: Path, ids: list[int], vocab_size: int) -> Index:
    write_index(folder / "index", np.array(ids), vocab_size, "a tokenizer")
    return Index(folder / "index")


def plain(ids: list[int], match: list[int]) -> list[int]:
    """Where ids go on after a match."""
    count = len(match)
    return [i + count for i in range(len(ids) - count + 1) if ids[i : i + count] == match]


# Ids of two bytes, whose halves look like other ids; and of four.
@pytest.mark.parametrize(("vocab_size", "step"), [(3, 1), (60_000, 257), (200_000, 65_537)])
def test_it_finds_what_a_plain_search_finds(vocab_size: int, step: int, tmp_path: Path) -> None:
    rng = random.Random(1)
    ids = [step * rng.randrange(3) for _ in range(500)]
    index = written(tmp_path, ids, vocab_size)
    assert index.about.tokens == 500
    for _ in range(300):
        match = [step * rng.randrange(3) for _ in range(rng.randint(1, 7))]
        expected = sorted(tuple(ids[at : at + 3]) for at in plain(ids, match))
        places = index.find(match)
        rows = index.behind(places, len(match), 3, 500).tolist() if places else []
        assert sorted(tuple(x for x in row if x >= 0) for row in rows) == expected


def test_of_many_places_some_are_read_evenly(tmp_path: Path) -> None:
    ids = [x for i in range(1000) for x in (7, i + 10)]
    index = written(tmp_path, ids, 2000)
    found = index.behind(index.find([7]), 1, 1, 10)[:, 0]
    assert found.tolist() == list(range(10, 1010, 100))


@pytest.mark.parametrize("longest", [1, 3, 16])
def test_a_corpus_gives_the_longest_match_first(longest: int, tmp_path: Path) -> None:
    rng = random.Random(2)
    ids = [rng.randrange(5) for _ in range(400)]
    store = CorpusStore(OpenIndex(written(tmp_path, ids, 5)), longest)
    for _ in range(100):
        text = [rng.randrange(5) for _ in range(rng.randint(1, 8))]
        expected: list[int] = []
        for length in range(min(longest, len(text)), 0, -1):
            count = len(plain(ids, text[-length:]))
            if count > (expected[-1] if expected else 0):
                expected.append(count)
        found = [len(rows) for rows in store.continuations(text, 2)]
        assert found == [min(count, 64) for count in expected]


def test_ids_that_it_cannot_have_end_a_match(tmp_path: Path) -> None:
    store = CorpusStore(OpenIndex(written(tmp_path, [1, 2, 3], 5)), 16)
    assert [rows.tolist() for rows in store.continuations([70_000, 2], 2)] == [[[3, -1]]]
    assert not list(store.continuations([70_000], 2))


def test_bigrams_go_on_with_the_most_frequent_token(tmp_path: Path) -> None:
    ids = [0, 1, 0, 1, 0, 2, 1, 3]
    store = BigramStore(OpenIndex(written(tmp_path, ids, 6)))
    # 0 is followed by 1 twice; 1 by 0 twice; 3 and 4 by nothing.
    assert [rows.tolist() for rows in store.continuations([2], 4)] == [[[1, 0, 1, 0]]]
    assert [rows.tolist() for rows in store.continuations([2, 9, 0], 1)] == [[[1]]]
    assert not list(store.continuations([3], 4))
    assert not list(store.continuations([100], 4))


@pytest.mark.parametrize("name", [TOKENS, SUFFIXES, BIGRAMS])
def test_files_that_are_not_what_was_written_are_refused(name: str, tmp_path: Path) -> None:
    written(tmp_path, [0, 1, 2, 0, 1], 3)
    path = tmp_path / "index" / name
    whole = path.read_bytes()
    for content, sentence in (
        (whole[:-1], f"{name} has {len(whole) - 1} of {len(whole)} bytes"),
        (whole[:-1] + b"\7", f"{name} is not what was written"),
    ):
        path.write_bytes(content)
        with pytest.raises(StartupError, match=f"cannot be used: {sentence}; build it again"):
            Index(tmp_path / "index")
    path.unlink()
    with pytest.raises(StartupError, match=r"cannot be used: .*No such file"):
        Index(tmp_path / "index")


def test_what_is_no_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no index in .*: No such file"):
        Index(tmp_path)
    written(tmp_path, [0, 1], 3)
    about = tmp_path / "index" / ABOUT
    content = json.loads(about.read_text())
    about.write_text(json.dumps({**content, "version": 2}))
    with pytest.raises(StartupError, match=r"has the format 2, this version reads 1: build"):
        Index(tmp_path / "index")
    for said, sentence in (
        ("{}", "has the format None, this version reads 1"),
        ('{"version": 1}', "no index in .*: tokenizer: Field required"),
        (json.dumps({**content, "vocab_size": "3"}), "vocab_size: Input should be a valid integer"),
        (json.dumps({**content, "sha256": []}), "sha256: Input should be a valid dictionary"),
        ("[" * 100_000, "no index in "),
        ("[]", "no index in "),
    ):
        about.write_text(said)
        with pytest.raises(StartupError, match=sentence) as error:
            Index(tmp_path / "index")
        assert "\n" not in str(error.value)


def test_files_of_a_refused_index_are_closed(tmp_path: Path) -> None:
    written(tmp_path, [0, 1, 2], 3)
    (tmp_path / "index" / BIGRAMS).write_bytes(b"")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(StartupError):
            Index(tmp_path / "index")
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_index_is_told_from_another_by_what_it_holds(tmp_path: Path) -> None:
    first = written(tmp_path, [0, 1, 2], 3).about.fingerprint
    assert written(tmp_path, [0, 1, 2], 3).about.fingerprint == first
    assert written(tmp_path, [0, 2, 1], 3).about.fingerprint != first


def test_an_index_that_is_cut_short_while_it_serves_is_left_alone(tmp_path: Path) -> None:
    opened = OpenIndex(written(tmp_path, [0, 1, 2, 0, 1] * 2000, 3))
    stores: list[TextStore] = [CorpusStore(opened, 16), BigramStore(opened)]
    assert all(list(store.continuations([0], 2)) for store in stores)
    path = tmp_path / "index" / TOKENS
    with path.open("r+b") as file:
        file.truncate(10)
    with capture_logs() as logs:
        assert not any(list(store.continuations([0], 2)) for store in stores * 2)
    assert [line["log_level"] for line in logs] == ["warning"]


def test_an_index_that_is_replaced_goes_on_serving(tmp_path: Path) -> None:
    opened = OpenIndex(written(tmp_path, [0, 1, 2], 3))
    write_index(tmp_path / "index", np.array([0, 2, 2]), 3, "a tokenizer")
    store = CorpusStore(opened, 16)
    assert [rows.tolist() for rows in store.continuations([0], 1)] == [[[1]]]
    assert Index(tmp_path / "index").find([0, 2])


def test_the_only_index_of_the_cache_folder_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_index("somewhere") == Path("somewhere")
    with pytest.raises(StartupError, match=r"there is no index in .*tandem index build"):
        find_index("")
    write_index(indexes_folder() / "one", np.array([1]), 3, "a tokenizer")
    assert find_index("") == indexes_folder() / "one"
    shutil.copytree(indexes_folder() / "one", indexes_folder() / "two")
    with pytest.raises(StartupError, match=r"there are 2 indexes in .*: name the folder of one"):
        find_index("")
