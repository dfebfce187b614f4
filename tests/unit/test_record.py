"""What is remembered of earlier starts, and what a crash leaves behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from tandem.inference import choice, record
from tandem.inference.choice import choose_backend
from tandem.inference.record import Record
from tests.architectures import LLAMA, build
from tests.tiny import random_llama


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return record.cache_folder()


def test_a_clear_measurement_is_remembered_and_a_close_one_is_not(folder: Path) -> None:
    model = random_llama(1)
    assert Record(model, 1).clear_gain is None
    for gain, remembered in ((1.5, 1.5), (1.1, None), (0.5, 0.5), (0.9, None)):
        Record(model, 1).measured(gain)
        assert Record(model, 1).clear_gain == remembered
    Record(model, 1).measured(2.0)
    assert Record(model, 2).clear_gain is None, "other threads, another measurement"
    assert Record(model.to(torch.bfloat16), 1).clear_gain is None


def test_tries_that_never_end_are_crashes_for_a_day(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_llama(1)
    for _ in range(3):
        assert not Record(model, 1).crashes
        Record(model, 1).begin()
    assert Record(model, 1).crashes
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * 86_400)
    assert not Record(model, 1).crashes
    Record(model, 1).begin()
    assert not Record(model, 1).crashes, "it is tried anew, as often"


def test_a_try_that_ends_is_no_crash(folder: Path) -> None:
    model = random_llama(1)
    for _ in range(5):
        Record(model, 1).begin()
        Record(model, 1).end()
    assert not Record(model, 1).crashes


@pytest.mark.parametrize("content", ["", "null", "[1]", '{"tries": 3, "tried_at": 0, "gain": "x"}'])
def test_a_broken_record_is_none(folder: Path, content: str) -> None:
    found = Record(random_llama(1), 1)
    found.measured(2.0)
    found.path.write_text(content)
    assert found.clear_gain is None
    assert not found.crashes


def test_without_a_place_nothing_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = Record(random_llama(1), 1)
    found.begin()
    found.measured(2.0)
    assert found.clear_gain is None


@pytest.mark.parametrize(("gain", "engine"), [(2.0, "openvino"), (0.5, "torch")])
def test_what_was_clear_is_not_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gain: float, engine: str
) -> None:
    pytest.importorskip("openvino")
    model = build(LLAMA)
    Record(model, torch.get_num_threads()).measured(gain)
    monkeypatch.setattr(choice, "_gain", None)
    monkeypatch.setattr(choice, "_by_openvino" if engine == "torch" else "_by_torch", None)
    with torch.inference_mode():
        assert choose_backend(model, "auto").name == engine


@pytest.mark.parametrize("engine", ["auto", "openvino"])
def test_what_crashed_is_left_to_torch(folder: Path, engine: choice.EngineName) -> None:
    model = random_llama(1)
    found = Record(model, torch.get_num_threads())
    for _ in range(3):
        found.begin()
    with capture_logs() as logs, torch.inference_mode():
        assert choose_backend(model, engine).name == "torch"
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["remove_to_try_again"] == str(found.path)
