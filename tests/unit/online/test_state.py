"""What was learnt, on disk."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.errors import StartupError
from tandem.online.state import Learnt, StateFolder


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    return StateFolder(tmp_path / "state")


def offer(state: StateFolder, content: bytes = b"weights") -> Path:
    path = state.path / "offers" / "offer-0001.safetensors"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def again(state: StateFolder) -> StateFolder:
    state.close()
    return StateFolder(state.path)


def test_it_begins_with_nothing(state: StateFolder) -> None:
    assert (state.learnt, state.weights, state.saves) == (Learnt(), "", True)


def test_weights_that_are_taken_are_found_again(state: StateFolder) -> None:
    state.know("fingerprint")
    state.take(offer(state, b"one"))
    state.take(offer(state, b"two"))
    found = again(state)
    assert found.learnt == Learnt("fingerprint", 2, "00000002.safetensors", updates=2)
    assert Path(found.weights).read_bytes() == b"two"
    assert len(list((state.path / "weights").iterdir())) == 1


def test_one_process_has_it_at_a_time(state: StateFolder) -> None:
    with pytest.raises(StartupError, match="another process is at work"):
        StateFolder(state.path)
    state.close()
    StateFolder(state.path).close()


@pytest.mark.parametrize("cut", ["replace", "unlink"])
def test_a_process_that_is_killed_leaves_weights_that_are_whole(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    """At each change of the folder."""
    state.take(offer(state, b"one"))
    for number in range(1, 4):
        left, real = [number], getattr(Path, cut)

        def counted(path: Path, *rest: object, left=left, real=real, **keys: object):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt  # nothing after it happens
            return real(path, *rest, **keys)

        with monkeypatch.context() as patch:
            patch.setattr(Path, cut, counted)
            with suppress(KeyboardInterrupt):
                state.take(offer(state, b"two"))
        state = again(state)
        content = Path(state.weights).read_bytes()
        assert content == (b"one" if state.learnt.version == 1 else b"two")
        if state.learnt.version > 1:
            break


def test_a_reset_is_a_further_version(state: StateFolder) -> None:
    state.know("fingerprint")
    state.take(offer(state))
    (state.path / "replay").mkdir()
    (state.path / "home.safetensors").touch()
    state.forget_texts()
    assert again(state).learnt.version == 1
    state.begin_again()
    found = again(state)
    assert found.learnt == Learnt("fingerprint", 2, updates=1)
    left = {path.name for path in state.path.rglob("*") if path.is_file()}
    assert left == {"state.json", "lock"}


@pytest.mark.parametrize("anew", [False, True])
def test_a_reset_that_is_cut_has_forgotten_the_texts(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    state.know("fingerprint")
    state.take(offer(state, b"one"))
    (state.path / "replay").mkdir()
    (state.path / "replay" / "00000001-8.safetensors").touch()

    def cut(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(StateFolder, "write", cut)
        state.begin_again(anew=anew)
    found = again(state)
    assert (found.learnt.of, found.learnt.version) == ("fingerprint", 1)
    assert Path(found.weights).read_bytes() == b"one"
    assert not (state.path / "replay").exists()


def test_a_reset_whose_texts_stay_is_none(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.take(offer(state))

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("tandem.online.state.shutil.rmtree", refused)
    with pytest.raises(OSError, match="not permitted"):
        state.begin_again()
    assert state.learnt.version == 1


def test_what_a_killed_process_left_is_removed(state: StateFolder) -> None:
    state.take(offer(state))
    offer(state)
    (state.path / "replay").mkdir()
    left = ("replay/00000005-8.safetensors.new", "state.json.new", "weights/00000002.safetensors")
    for name in left:
        (state.path / name).write_bytes(b"half")
    again(state)
    names = {path.name for path in state.path.rglob("*") if path.is_file()}
    assert names == {"state.json", "lock", "00000001.safetensors"}


def test_another_checkpoint_begins_anew(state: StateFolder) -> None:
    state.know("fingerprint")
    (state.path / "home.safetensors").touch()
    state.write(replace(state.learnt, frozen=True))
    assert state.begin_again(anew=True) == Learnt("", 1, frozen=True)
    state.know("another")
    state.know("ignored")
    assert again(state).learnt.of == "another"
    assert not (state.path / "home.safetensors").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}x", '{"version": 1, "unknown": 2}'])
def test_a_state_that_cannot_be_read_is_refused(state: StateFolder, content: str) -> None:
    (state.path / "state.json").write_text(content)
    with pytest.raises(StartupError, match="remove the folder to begin anew"):
        again(state)


def test_weights_that_are_gone_are_named(state: StateFolder) -> None:
    state.take(offer(state))
    Path(state.weights).unlink()
    with pytest.raises(StartupError, match="00000001"):
        again(state)


def test_a_folder_that_cannot_be_written_is_read(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.take(offer(state))
    written = json.loads((state.path / "state.json").read_text())

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refused)
    found = again(state)
    assert (found.saves, found.learnt.version) == (False, 1)
    found.write(replace(found.learnt, frozen=True))
    assert json.loads((state.path / "state.json").read_text()) == written
    found.close()


def test_a_full_disk_leaves_the_state_before(
    state: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.take(offer(state, b"one"))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        state.take(offer(state, b"two"))
    assert state.learnt.version == 1
    found = again(state)
    assert Path(found.weights).read_bytes() == b"one"
