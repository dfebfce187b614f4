"""The texts that are learnt from, on disk."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tandem.online.kept_text import TOP, KeptText
from tandem.online.replay import Replay


def text(number: int, tokens: int = 10) -> KeptText:
    return KeptText(
        np.full(tokens, number, np.uint32),
        np.array([4], np.int32),
        np.zeros((1, TOP), np.uint32),
        np.ones((1, TOP), np.uint16),
        np.array([True]),
        np.array([60000], np.uint16),
    )


def numbers_in(replay: Replay) -> list[int]:
    return [int(each.token_ids[0]) for file in replay.files() for each in replay.read(file)]


def test_texts_are_found_in_their_order(tmp_path: Path) -> None:
    replay = Replay(tmp_path / "replay", 1 << 20, 60)
    assert replay.files() == []
    replay.add([text(1), text(2)])
    replay.add([text(3)])
    again = Replay(tmp_path / "replay", 1 << 20, 60)
    assert numbers_in(again) == [1, 2, 3]
    assert [file.texts for file in again.files()] == [2, 1]
    assert again.bytes == sum(path.stat().st_size for path in (tmp_path / "replay").iterdir())


def test_the_oldest_yield_where_it_grows_too_large(tmp_path: Path) -> None:
    replay = Replay(tmp_path, 1 << 20, 60)
    replay.add([text(1)])
    one = replay.bytes
    replay = Replay(tmp_path, 3 * one, 60)
    for number in range(2, 9):
        replay.add([text(number)])
        replay.prune()
        assert replay.bytes <= 3 * one
    assert numbers_in(replay) == [6, 7, 8]
    replay.add([text(9, 100_000)])  # more than is allowed: the newest alone stays
    replay.prune()
    assert numbers_in(replay) == [9]


def test_texts_with_many_states_are_in_files_of_their_own(tmp_path: Path) -> None:
    """So that the newest file, which stays, is smaller than the least bound."""
    replay = Replay(tmp_path, 1 << 24, 60)
    states = np.zeros((1, 1, 1 << 20), np.int16)  # 2 MiB
    replay.add([replace(text(number), states=states) for number in range(8)])
    assert [file.texts for file in replay.files()] == [3, 3, 2]
    assert numbers_in(replay) == [*range(8)]
    replay.prune()
    assert 8 << 20 < replay.bytes <= 1 << 24
    assert numbers_in(replay) == [*range(3, 8)]


def test_texts_that_are_too_old_are_removed(tmp_path: Path) -> None:
    now = 1000.0
    replay = Replay(tmp_path, 1 << 20, 60, clock=lambda: now)
    for number in (1, 2):
        replay.add([text(number)])
        os.utime(replay.files()[-1].path, (now, now))
        now += 40
    replay.prune()
    assert numbers_in(replay) == [2]
    now += 1000
    replay.prune()  # the newest too
    assert numbers_in(replay) == []


def test_a_file_that_is_broken_or_gone_has_no_texts(tmp_path: Path) -> None:
    replay = Replay(tmp_path, 1 << 20, 60)
    replay.add([text(1)])
    replay.add([text(2)])
    first, second = replay.files()
    first.path.write_bytes(first.path.read_bytes()[:-7])
    (tmp_path / "00000003-1.safetensors").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("not ours")
    assert numbers_in(replay) == [2]
    second.path.unlink()
    assert replay.read(second) == []
    replay.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = Replay(tmp_path, 1 << 20, 60)
    replay.add([text(1)])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tandem.online.replay.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        replay.add([text(2)])
    assert numbers_in(replay) == [1]
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"]
