"""The benchmark of a GPU, with tiny models on a CPU: each section finds something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import pair
from benchmarks.gpu.run import Run
from benchmarks.gpu.sections import rounds, start
from benchmarks.gpu.shapes import Shapes, fake, real
from benchmarks.gpu.table import MOST_CHARACTERS, Figure, short_table
from benchmarks.gpu.timing import Deadline
from tandem.inference.loading.checkpoint import LoadedCheckpoint

# The others start processes: they are in tests/system/benchmarks/test_gpu.py.
HERE = ("ceilings", "start", "passes", "prefixes", "drafts", "rounds", "numbers", "long")
DEVICE = ("kernels", "numbers-device", "rounds-device")
# The begin of a line that each section has.
LINES = {
    "ceilings": "ceilings",
    "start": "prompt chunk, target",
    "passes": "target, 16 at 32",
    "prefixes": "target, 48 tokens after 64",
    "drafts": "drafts beside their passes",
    "rounds": "rounds, 16, T1",
    "numbers": "host, verdict 16x8",
    "long": "drafter, 1 at 512",
    "kernels": "kernels, target 16x5",
    "numbers-device": "device, draw 16",
    "rounds-device": "device in rounds, T1",
}


def test_each_section_finds_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rounds, "SETTINGS", rounds.SETTINGS[:6])
    options = command.options_of(
        ["--fake", "--no-peer", "--out", str(tmp_path), "--sections", ",".join(HERE + DEVICE)]
    )
    run = command.measure(options)
    assert (run.errors, run.left_out) == ({}, [])
    for section, line in LINES.items():
        own = [figure for figure in run.figures if figure.line.startswith(line)]
        assert own, section
        # Of other threads than its own the profiler of a CPU sees nothing.
        assert section == "rounds-device" or all(figure.value > 0 for figure in own), section
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert len(found["figures"]) == len(run.figures)
    assert set(found["seconds"]) == set(HERE + DEVICE)
    tree = found["found"]["rounds"]["1, T1, tree 4/12"]
    assert tree["tokens_a_round"] > 1
    assert tree["compiler"]["compilations"] == 0
    said = capsys.readouterr().out
    assert said.rstrip().endswith("all bars hold that were measured")
    assert len("\n".join(run.lines())) < MOST_CHARACTERS
    assert f"{'bar':>4}" in (tmp_path / "gpu.txt").read_text()


def test_the_pair_agrees_as_a_real_one_does() -> None:
    shapes = fake()
    laws = []
    for name in ("target", "drafter"):
        model = pair.made(name, shapes)
        with torch.inference_mode():
            logits = model(torch.tensor([pair.tokens(200, shapes)])).logits[0]
        laws.append(logits.softmax(-1))
    overlap = torch.minimum(*laws).sum(-1).mean()
    assert 0.65 < overlap < 0.85


def test_without_a_gpu_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--fake" in said


def test_what_does_not_fit_is_left_out_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is too large: what only the drafter needs is measured."""
    own = pair.checkpoint

    def made(name: str, shapes: Shapes) -> LoadedCheckpoint:
        if name == "target":
            raise torch.cuda.OutOfMemoryError("tried to allocate 16 GiB")
        return own(name, shapes)

    monkeypatch.setattr(pair, "checkpoint", made)
    sections = "start,passes,drafts,rounds,services"
    run = command.measure(
        command.options_of(["--fake", "--out", str(tmp_path), "--sections", sections])
    )
    assert run.errors == {}
    left_out = [one.partition(":")[0] for one in run.left_out]
    assert left_out == ["start of the target", "rounds", "services"]
    assert any(figure.line.startswith("drafter, 16") for figure in run.figures)


def test_a_small_gpu_gets_a_small_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(real(), tmp_path, Deadline(1))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 << 30, 80 << 30))
    assert start.positions_for(run) == run.shapes.positions
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40 << 30, 40 << 30))
    assert 40_000 < start.positions_for(run) < run.shapes.positions
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24 << 30, 24 << 30))
    with pytest.raises(pair.LeftOut, match=r"needs \d+ GB"):
        start.positions_for(run)
    run.left_out.append("start of the target: no room")
    assert start.positions_for(run) == run.shapes.positions


def test_a_failure_ends_its_section_alone(tmp_path: Path) -> None:
    run = Run(fake(), tmp_path, Deadline(60))

    def fails(run: Run, until: Deadline) -> None:
        run.add(Figure("first", "half", 1.0))
        raise ValueError("it broke")

    run.section("one", fails, 1.0)
    run.section("two", lambda run, until: run.add(Figure("second", "whole", 2.0)), 1.0)
    assert run.errors == {"one": "ValueError: it broke"}
    assert [figure.line for figure in run.figures] == ["first", "second"]
    assert json.loads((tmp_path / "gpu.json").read_text())["errors"] == run.errors


def test_bars_that_do_not_hold_come_last(tmp_path: Path) -> None:
    run = Run(fake(), tmp_path, Deadline(60))
    run.add(
        Figure("target", "x1", 7.6, "ms", 4.95, 1.3, mark="L"),
        Figure("target", "x5", 6.0, "ms", 4.95, 1.3),
        Figure("chunk", "beside", 68, "", None, 150, True),
        Figure("rounds", "4", 11.0, bar=11.5),
    )
    *_, title, first, second = run.lines()
    assert title == "bars that do not hold:"
    assert first == "target: x1 7.6L=1.54x [<=1.3 FAILED]"
    assert second == "chunk: beside 68.0 [>=150 FAILED]"


def test_the_short_table_ends_where_it_must() -> None:
    figures = [Figure(f"line {n}", "x1", 1.0) for n in range(100)]
    lines = short_table(figures, 500)
    assert sum(map(len, lines)) < 550
    assert lines[-1] == "... the rest is in gpu.txt"
