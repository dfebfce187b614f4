"""Building an index reads the texts of a folder, in order, up to a bound."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tandem.errors import StartupError
from tandem.retrieval.build import LARGEST_FILE, build_index, text_files
from tandem.retrieval.index import Index
from tandem.vocabulary import vocabulary_fingerprint

WORDS = {word: i for i, word in enumerate(("<end>", "a", "b", "c", "?"))}


@pytest.fixture
def tokenizer() -> Tokenizer:
    made = Tokenizer(WordLevel(WORDS, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "texts"
    (place / "sub").mkdir(parents=True)
    (place / "1.txt").write_text("a b")
    (place / "sub" / "2.txt").write_text("b c")
    (place / "3.bin").write_bytes(b"\xff\xfe\x00")
    (place / "4.txt").write_text("")
    (place / "5.txt").write_text("c " * LARGEST_FILE)
    (place / "site-packages").mkdir()
    (place / "site-packages" / "6.txt").write_text("c c c")
    return place


def test_texts_are_read_in_order_and_separated(folder: Path, tokenizer: Tokenizer) -> None:
    files = text_files(folder, ["*"])
    assert [path.name for path in files] == ["1.txt", "3.bin", "2.txt"]
    told: list[tuple[int, int, int]] = []
    place = folder.parent / "index"
    about = build_index(
        files, tokenizer, place, "texts", 100, 0, lambda *progress: told.append(progress)
    )
    assert (about.tokens, about.files, about.vocab_size) == (6, 2, 5)
    assert about.tokenizer == vocabulary_fingerprint(WORDS)
    assert told[-1] == (3, 3, 6)
    index = Index(place)
    assert index.behind(index.find([1]), 0, 6, 9).tolist() == [[1, 2, 0, 2, 3, 0]]
    assert [path.name for path in folder.parent.iterdir() if "new" in path.name] == []


def test_reading_ends_at_the_bound(folder: Path, tokenizer: Tokenizer) -> None:
    files = text_files(folder, ["*.txt"])
    about = build_index(files, tokenizer, folder.parent / "index", "texts", 3)
    assert about.tokens == 3


def test_a_folder_without_texts_is_refused(folder: Path, tokenizer: Tokenizer) -> None:
    for files in ([], text_files(folder, ["*.bin"])):
        with pytest.raises(StartupError, match="no text in texts: no file of UTF-8"):
            build_index(files, tokenizer, folder.parent / "index", "texts", 3)
    assert not (folder.parent / "index").exists()


def test_settings_of_the_tokenizers_file_do_not_shorten_texts(
    folder: Path, tokenizer: Tokenizer
) -> None:
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=9)
    about = build_index(text_files(folder, ["1.txt"]), tokenizer, folder / "i", "texts", 100)
    assert about.tokens == 2


def test_what_is_there_is_not_overwritten_unless_it_is_an_index(
    folder: Path, tokenizer: Tokenizer
) -> None:
    files = text_files(folder, ["1.txt"])
    for place in (folder, folder / "1.txt"):
        with pytest.raises(StartupError, match="is there and is no index: name another folder"):
            build_index(files, tokenizer, place, "texts", 100)
    assert (folder / "1.txt").read_text() == "a b"
    place = folder.parent / "index"
    place.mkdir()
    for _ in range(2):
        assert build_index(files, tokenizer, place, "texts", 100).tokens == 2
    with pytest.raises(StartupError, match=r"cannot write the index .*Not a directory"):
        build_index(files, tokenizer, folder / "1.txt" / "index", "texts", 100)
