"""What is remembered of earlier starts, and what a crash leaves behind."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tandem.inference import decoder as decoder_module
from tandem.inference import disk_cache
from tandem.inference.choice import choose as choice
from tandem.inference.choice import speed
from tandem.inference.choice.choose import choose_backend
from tandem.inference.choice.record import StartRecord
from tandem.inference.choice.speed import profile_of
from tests.support.decoders import decoder_over
from tests.support.models.architectures import LLAMA, build
from tests.support.models.tiny import random_llama


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return disk_cache.cache_folder()


def test_the_fastest_way_is_remembered_and_how_clearly(folder: Path) -> None:
    model = random_llama(1)
    assert (StartRecord(model, 1).best, StartRecord(model, 1).clear) == ("", False)
    for best, lead, clear in (
        ("a", 1.5, False),
        ("a", 1.2, True),
        ("a", 1.1, False),  # a close one begins anew
        ("a", 1.5, False),
        ("b", 1.5, False),  # as does another
        ("b", 1.5, True),
    ):
        StartRecord(model, 1).measured(best, lead)
        assert (StartRecord(model, 1).best, StartRecord(model, 1).clear) == (best, clear)
    assert not StartRecord(model, 2).best, "other threads, another measurement"
    assert not StartRecord(model, 1, "drafts").best, "other ways, another measurement"
    assert not StartRecord(model.to(torch.bfloat16), 1).best


def test_what_was_clear_holds_for_a_day(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was busy when both starts measured finds it out."""
    model, now = random_llama(1), time.time()
    for _ in range(2):
        StartRecord(model, 1).measured("a", 2.0)
    assert StartRecord(model, 1).clear
    for later, clear in ((3600, True), (2 * 86_400, False), (-3600, False)):
        monkeypatch.setattr(time, "time", lambda later=later: now + later)
        assert StartRecord(model, 1).clear == clear
        assert StartRecord(model, 1).best == "a", "it begins with it all the same"


def test_tries_that_never_end_are_crashes_for_a_day(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_llama(1)
    for _ in range(3):
        assert not StartRecord(model, 1).crashes
        StartRecord(model, 1).begin()
    assert StartRecord(model, 1).crashes
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 86_400)
    assert not StartRecord(model, 1).crashes
    StartRecord(model, 1).begin()
    assert not StartRecord(model, 1).crashes, "it is tried anew, as often"


def test_a_try_that_ends_is_no_crash(folder: Path) -> None:
    model = random_llama(1)
    for _ in range(5):
        StartRecord(model, 1).begin()
        StartRecord(model, 1).end()
    assert not StartRecord(model, 1).crashes


@pytest.mark.parametrize("content", ["", "null", "[1]", '{"tries": 3, "tried_at": "x"}'])
def test_a_broken_record_is_none(folder: Path, content: str) -> None:
    found = StartRecord(random_llama(1), 1)
    found.measured("torch float32", 2.0)
    found.path.write_text(content)
    assert not found.best
    assert not found.crashes


def test_without_a_place_nothing_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = StartRecord(random_llama(1), 1)
    found.begin()
    found.measured("torch float32", 2.0)
    assert not found.best


def record_of(model: Any, engine: str = "auto", drafts: bool = False) -> StartRecord:
    """As a start asks for it."""
    return StartRecord(model, torch.get_num_threads(), engine, drafts)


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_what_was_clear_is_not_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    pytest.importorskip("openvino")
    model = build(LLAMA)
    for _ in range(2):
        record_of(model).measured(f"{engine} float32", 2.0)
    monkeypatch.setattr(choice, "by_openvino" if engine == "torch" else "by_torch", None)
    with torch.inference_mode():
        chosen = choose_backend(model, "auto")
    assert (chosen.backend.engine, chosen.trial) == (engine, None)


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_what_was_close_begins_and_is_measured_again(folder: Path, engine: str) -> None:
    pytest.importorskip("openvino")
    model = build(LLAMA)
    found = record_of(model)
    found.measured(f"{engine} float32", 1.05)
    with torch.inference_mode():
        chosen = choose_backend(model, "auto")
        assert chosen.backend.engine == engine
        assert chosen.trial is not None
        chosen.trial.run(chosen.backend)
    assert found.best in ("torch float32", "openvino float32")


@pytest.mark.parametrize("engine", ["auto", "openvino"])
def test_what_crashed_is_left_to_torch(folder: Path, engine: choice.EngineName) -> None:
    model = random_llama(1)
    found = record_of(model, engine)
    for _ in range(3):
        found.begin()
    with capture_logs() as logs:
        decoder = decoder_over(model, "tiny", engine=engine)
        decoder.improve()
    assert decoder.engine == "torch"
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["remove_to_try_again"] == str(found.path)


def test_what_passes_take_is_measured_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_over(random_llama(1), "tiny", at_most=2048)
    assert not decoder.pass_times
    decoder.measure(4096)
    assert {(sequences, rows) for sequences, rows, _ in decoder.pass_times} >= {(1, 1), (1, 5)}
    assert all(nanoseconds > 0 for _, _, nanoseconds in decoder.pass_times)
    assert decoder.free_positions == decoder.positions
    assert not decoder.forward_passes, "no pass that serves"
    monkeypatch.setattr(decoder_module, "profile_of", None)
    again = decoder_over(random_llama(1), "tiny", at_most=2048)
    again.measure(4096)
    assert again.pass_times == decoder.pass_times
    StartRecord(random_llama(1), torch.get_num_threads(), "torch", False).measured("x", 2.0)
    again.measure(4096)  # the fastest way is another question
    assert again.pass_times == decoder.pass_times


@pytest.mark.parametrize(("positions", "known"), [(16, set()), (100, {1}), (400, {1, 4})])
def test_passes_are_measured_as_far_as_the_memory_reaches(positions: int, known: set[int]) -> None:
    decoder = decoder_over(random_llama(1), "tiny", at_most=positions)
    with torch.inference_mode():
        passes = profile_of(decoder._backends.current, 64)
    assert decoder.free_positions == decoder.positions
    assert {sequences for sequences, _, _ in passes} == known


@torch.inference_mode()
def test_prompts_are_measured_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = decoder_over(random_llama(1), "tiny", at_most=400)._backends.current
    passes = profile_of(backend, 300, (32, 256, 2048))
    assert [rows for sequences, rows, _ in passes if sequences == 1] == [1, 5, 17, 32, 236]
    assert backend.pool.free_positions == backend.pool.positions
    small = decoder_over(random_llama(1), "tiny", at_most=100)._backends.current
    assert [rows for _, rows, _ in profile_of(small, 300, (256,))] == [1, 5, 17]
    # However slow they are, the passes of one sequence are all there.
    monkeypatch.setattr(speed, "_PROFILE_SECONDS", 0.0)
    shapes = [(sequences, rows) for sequences, rows, _ in profile_of(backend, 300, (32,))]
    assert shapes == [(1, 1), (1, 5), (1, 17), (1, 32)]


@torch.inference_mode()
def test_prompts_that_a_device_cannot_hold_are_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = decoder_over(random_llama(1), "tiny", at_most=400)._backends.current
    best = speed._best

    def failing(backend: Any, caches: Any, rows: int, *others: Any, **named: Any) -> int:
        if rows > 100:
            raise torch.OutOfMemoryError("of the device")
        return best(backend, caches, rows, *others, **named)

    monkeypatch.setattr(speed, "_best", failing)
    passes = profile_of(backend, 300, (256,))
    assert {rows for _, rows, _ in passes} == {1, 5, 17}
    assert backend.pool.free_positions == backend.pool.positions


@pytest.mark.parametrize("profiles", ["[]", '{"a": 1}', '{"a": [[1, 2]]}', '{"a": [["x", 1, 1]]}'])
def test_broken_times_of_passes_are_none(folder: Path, profiles: str) -> None:
    record = StartRecord(random_llama(1), 1)
    record.profiled("a", [(1, 1, 5.0)])
    assert record.profile("a") == [(1, 1, 5.0)]
    text = record.path.read_text()
    record.path.write_text(re.sub(r'"profiles": .*\}\}?', f'"profiles": {profiles}}}', text))
    assert record.profile("a") == []
    record.measured("a", 2.0)
    assert record.best == "a"
