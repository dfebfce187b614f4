"""Clock offsets of hosts, from the times that both sides recorded for the same calls."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tandem.tools.traces.analysis.attribution import segments
from tandem.tools.traces.analysis.report import TraceReport
from tandem.tools.traces.read.recording import Recording
from tandem.tools.traces.read.spans import RecordedSpan
from tandem.tools.traces.show.report import remarks
from tests.support.traces import MS, Tape, recorded, request


def offsets(recording: Recording) -> dict[str, float]:
    return {skew.callee.service: skew.offset_ns / MS for skew in recording.skews}


def record(folder: Path, **ahead_ms: float) -> Recording:
    tape = Tape(ahead_ms)
    request(tape, [(2, 1), (3, 0)])
    return Recording([str(tape.write(folder / "trace.jsonl"))])


@pytest.mark.parametrize("ahead", [-5_000.0, -2.0, 40.0, 86_400_000.0])
def test_a_host_whose_clock_is_ahead_or_behind(ahead: float, tmp_path: Path) -> None:
    recording = record(tmp_path, target=ahead, drafter=1.5)
    assert offsets(recording) == pytest.approx({"target": ahead, "drafter": 1.5})
    assert all(skew.seen and skew.measured for skew in recording.skews)
    (shifted,) = recording.requests()
    (straight,) = record(tmp_path).requests()
    spent = [[(s.stage, s.duration_ns) for s in segments(r)] for r in (shifted, straight)]
    assert spent[0] == spent[1]


def test_skew_is_said_aloud_and_its_absence_too(tmp_path: Path) -> None:
    said = remarks(TraceReport.of(record(tmp_path, target=-2.0)))
    assert said == [
        "clocks of drafter and orchestrator: no skew seen (± 0.500 ms, from 3 exchanges)",
        "CLOCK SKEW: target is 2.000 ms behind orchestrator (± 0.500 ms); times are corrected",
    ]


def test_an_offset_below_its_uncertainty_is_no_skew(tmp_path: Path) -> None:
    recording = record(tmp_path, target=0.4)
    assert offsets(recording)["target"] == pytest.approx(0.4)
    assert not any(skew.seen for skew in recording.skews)


def test_slow_exchanges_do_not_count(tmp_path: Path) -> None:
    """Replies that wait for a busy event loop would pull a mean by half their wait."""
    numbers = random.Random(0)
    tape = Tape({"target": 10.0})
    for trace in range(1, 401):
        late = 0.0 if trace % 4 == 0 else numbers.uniform(1, 50)
        root = tape.span("orchestrator", "generate", 0, 100, trace=trace, kind="SERVER")
        call = tape.span("orchestrator", "call.verify", 0, 5 + late, root, "CLIENT", trace)
        tape.span("target", "verify", 0.2, 4.8, call, "SERVER", trace)
    (skew,) = Recording([str(tape.write(tmp_path / "trace.jsonl"))]).skews
    assert skew.offset_ns == pytest.approx(10 * MS, abs=1)
    assert skew.uncertainty_ns == pytest.approx(0.2 * MS, abs=1)
    assert skew.exchanges == 400


def test_without_clients_spans_only_what_cannot_be_is_corrected(tmp_path: Path) -> None:
    for ahead, corrected in ((0.0, 0.0), (3.0, 0.0), (-50.0, -51.0), (70.0, 69.0)):
        tape = Tape({"target": ahead})
        root = tape.span("orchestrator", "generate", 0, 30, kind="SERVER")
        round_ = tape.span("orchestrator", "round", 0, 30, root)
        tape.span("target", "verify", 8, 20, round_, "SERVER")
        (skew,) = Recording([str(tape.write(tmp_path / "trace.jsonl"))]).skews
        assert not skew.measured
        assert skew.offset_ns / MS == pytest.approx(corrected)
        assert skew.uncertainty_ns / MS == pytest.approx(9)


def test_passes_are_corrected_too(tmp_path: Path) -> None:
    tape = Tape({"target": 1_000.0})
    request(tape, [(2, 1)])
    tape.span("target", "pass", 20, 25, trace=77, tandem__batch_size=3)
    recording = Recording([str(tape.write(tmp_path / "trace.jsonl"))])
    passes: list[RecordedSpan] = []
    (found,) = recording.requests(passes.append)
    assert passes[0].start_ns == found.root.start_ns + 20 * MS


def test_one_process_has_no_skew(tmp_path: Path) -> None:
    path = recorded(tmp_path / "trace.jsonl", 1, [])
    text = path.read_text().replace('"drafter', '"orchestrator').replace('"target', '"orchestrator')
    path.write_text(text)
    assert Recording([str(path)]).skews == []
