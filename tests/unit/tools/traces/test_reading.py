"""Reading traces: our spans are kept, and all others are counted and reported."""

from __future__ import annotations

import base64
import gzip
import io
import random
import tracemalloc
from pathlib import Path

import pytest

from tandem.failure import Failure, Misconfigured
from tandem.tools.traces.analysis.quantiles import RELATIVE_ERROR, Quantiles
from tandem.tools.traces.analysis.report import TraceReport
from tandem.tools.traces.read import request as request_module
from tandem.tools.traces.read import source, store
from tandem.tools.traces.read.recording import Recording
from tests.support.traces import Tape, otlp, recorded, request


def names(recording: Recording) -> list[str]:
    return sorted(span.name for found in recording.requests() for span in found.spans)


@pytest.fixture
def tape() -> Tape:
    tape = Tape()
    request(tape, [(2, 1), (2, 2)])
    return tape


@pytest.fixture
def whole(tape: Tape, tmp_path: Path) -> list[str]:
    return names(Recording([str(tape.write(tmp_path / "whole.jsonl"))]))


def test_a_folder_is_the_same_as_one_file(tape: Tape, whole: list[str], tmp_path: Path) -> None:
    folder = tape.write_folder(tmp_path / "folder")
    assert len(list(folder.iterdir())) == 3
    assert names(Recording([str(folder)])) == whole
    files = sorted(folder.iterdir(), reverse=True)
    assert names(Recording(list(map(str, files)))) == whole


def test_gzip_is_known_by_its_bytes(tape: Tape, whole: list[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.of.any.name"
    text = "\n".join(tape.lines()).encode()
    halves = gzip.compress(text[:5000]) + gzip.compress(text[5000:])  # as `cat a.gz b.gz` has it
    path.write_bytes(halves)
    assert names(Recording([str(path)])) == whole


def test_standard_input(tape: Tape, whole: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO("\n".join(tape.lines()).encode())

    monkeypatch.setattr("sys.stdin", Stdin)
    assert names(Recording(["-"])) == whole


def test_ids_in_base64(tape: Tape, whole: list[str], tmp_path: Path) -> None:
    for spans in tape.spans.values():
        for span in spans:
            for key in ("traceId", "spanId", "parentSpanId"):
                if key in span:
                    span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
    assert names(Recording([str(tape.write(tmp_path / "base64.jsonl"))])) == whole


@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_that_is_cut_off(tape: Tape, tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "cut.jsonl"
    numbers = random.Random(0)  # so that the compressed file is long enough to be cut
    noise = otlp("shop", [{"name": numbers.randbytes(20_000).hex()}], "shop")
    data = ("\n".join([*tape.lines(), noise])).encode()
    path.write_bytes((gzip.compress(data) if zipped else data)[:-5_000])
    recording = Recording([str(path)])
    assert recording.left_out.sentences() == [f"the end of {path}, which is cut off"]
    assert TraceReport.of(recording).wall.count == 1


def test_lines_of_other_kinds_are_counted(tape: Tape, whole: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    broken = {"traceId": "no", "spanId": "hex", "name": "x"}
    backwards = {**tape.spans["target"][0], "endTimeUnixNano": "1"}
    lines = [
        "not json",
        "[1, 2]",
        "",
        '{"resourceSpans": 3}',
        '{"resourceLogs": []}',
        "[" * 5_000,
        *tape.lines(),
        tape.line("target"),
        otlp("shop", [{"name": "buy"}, {"name": "pay"}], "shop"),
        otlp("cart", [{"name": "add"}], "cart"),
        otlp("target", [broken, backwards]),
    ]
    path.write_text("\n".join(lines))
    recording = Recording([str(path)])
    assert names(recording) == whole
    assert recording.left_out.sentences() == [
        "3 x span of another program (shop, cart)",
        f"{len(tape.spans['target'])} x span that was read twice",
        "2 x span without an id, a name or sound times",
        "5 x line that is not OTLP-JSON",
    ]


def test_a_line_without_end_costs_no_memory(
    tape: Tape, whole: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(map(len, tape.lines())) + 1
    monkeypatch.setattr(source, "MAX_LINE_BYTES", longest)
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join(["x" * 3 * longest, *tape.lines()]) + "\n")
    recording = Recording([str(path)])
    assert names(recording) == whole
    assert recording.left_out.long_lines == 1


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x89PNG\r\n\x1a\n\x00\xff", b"\x1f\x8bnogzip"])
def test_a_file_without_a_span_says_what_it_saw_instead(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(content)
    with pytest.raises(Misconfigured, match=r"no span of Tandem in .*empty\.jsonl"):
        Recording([str(path)])


def test_another_programs_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "shop.jsonl"
    path.write_text(otlp("shop", [{"name": "buy"}], "shop"))
    with pytest.raises(Misconfigured) as caught:
        Recording([str(path)])
    assert caught.value.details == ("left out: 1 x span of another program (shop)",)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="no such file"):
        Recording([str(tmp_path / "nowhere.jsonl")])
    with pytest.raises(Misconfigured, match="no traces in"):
        Recording([str(tmp_path)])


def test_spans_that_are_missing(tape: Tape, tmp_path: Path) -> None:
    """A request without its drafter's file, orphans, and a trace without its `generate`."""
    del tape.spans["drafter"]
    tape.span("target", "verify", 0, 1, parent="00000000deadbeef", kind="SERVER")
    tape.span("target", "verify", 0, 1, parent="00000000deadbeef", kind="SERVER", trace=9)
    recording = Recording([str(tape.write(tmp_path / "partial.jsonl"))])
    report = TraceReport.of(recording)
    unseen = {str(stage) for stage in report.stages if stage.name.endswith(".unseen")}
    assert unseen == {"drafter draft.unseen"}
    assert sum(map(report.share, report.stages)) == pytest.approx(1)
    assert report.left_out == [
        "1 x incomplete trace, whose `generate` is missing",
        "2 x span whose parent is missing",
    ]


def test_a_trace_may_hold_several_requests(tmp_path: Path) -> None:
    tape = Tape()
    for number in range(3):
        request(tape, [(1, 1)], start=100 * number, name=f"r{number}")
    found = Recording([str(tape.write(tmp_path / "one.jsonl"))]).requests()
    assert sorted((r.id, len(r.spans)) for r in found) == [("r0", 30), ("r1", 30), ("r2", 30)]


def test_parents_in_a_circle_and_chains_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = Tape()
    root = tape.span("orchestrator", "generate", 0, 9, parent=f"{3:016x}", kind="SERVER")
    inner = tape.span("orchestrator", "round", 0, 9, root)
    assert tape.span("orchestrator", "novel", 0, 9, inner) == f"{3:016x}"
    (found,) = Recording([str(tape.write(tmp_path / "circle.jsonl"))]).requests()
    assert len(found.spans) == 3
    monkeypatch.setattr(request_module, "_MAX_DEPTH", 2)
    recording = Recording([str(tape.write(tmp_path / "circle.jsonl"))])
    (found,) = recording.requests()
    assert len(found.spans) == 2
    assert recording.left_out.orphans == 1


def test_traces_with_more_spans_than_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(tmp_path / "trace.jsonl", 1, [(2, 1)] * 20)
    monkeypatch.setattr(store, "MAX_TRACE_SPANS", 100)
    recording = Recording([str(path)])
    (found,) = recording.requests()
    assert len(found.spans) == 100
    assert recording.left_out.crowded_spans > 100


def test_failed_and_cancelled_requests_are_counted_apart(tmp_path: Path) -> None:
    tape = Tape()
    request(tape, [(2, 1)], trace=1)
    tape.span("orchestrator", "generate", 0, 9, trace=2, failed=True, error__type="PeerFailure")
    tape.span("orchestrator", "generate", 0, 9, trace=3, tandem__cancelled=True)
    tape.span("orchestrator", "generate", 0, 9, trace=4, failed=True, error__type="CancelledError")
    report = TraceReport.of(Recording([str(tape.write(tmp_path / "trace.jsonl"))]))
    assert report.wall.count == 1
    assert report.left_out == [
        "1 x request that failed",
        "2 x request that was cancelled",
    ]


def test_without_a_request_that_ended_well(tmp_path: Path) -> None:
    tape = Tape()
    tape.span("orchestrator", "generate", 0, 9, failed=True)
    with pytest.raises(Failure, match="no request that ended well"):
        TraceReport.of(Recording([str(tape.write(tmp_path / "trace.jsonl"))]))


def test_bytes_that_are_read_are_told(tape: Tape, tmp_path: Path) -> None:
    path = tape.write(tmp_path / "trace.jsonl")
    told: list[int] = []
    Recording([str(path)], told.append)
    assert sum(told) == path.stat().st_size


def test_memory_does_not_grow_with_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More spans than the cache holds go through the disk and come back whole.

    What Python allocates for a tenth of a recording is what it needs for all of it; the
    database's own memory is its cache.
    """
    monkeypatch.setattr(store, "_CACHE_MIB", 0)
    monkeypatch.setattr(store, "_BATCH", 100)
    peaks = []
    for texts in (12, 120):
        tape = Tape()
        for trace in range(1, texts + 1):
            request(tape, [(2, 1)] * 4, trace=trace)
        folder = tape.write_folder(tmp_path / str(texts))
        tracemalloc.start()
        report = TraceReport.of(Recording([str(folder)]))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (report.wall.count, report.rounds) == (texts, 4 * texts)
    assert peaks[1] < 1.5 * peaks[0]


def test_percentiles_are_within_their_error() -> None:
    numbers = random.Random(0)
    times = sorted(round(numbers.lognormvariate(14, 2)) for _ in range(5_001))
    counted = Quantiles()
    for time in numbers.sample(times, len(times)):
        counted.add(time)
    for share in (0.001, 0.5, 0.95, 0.99, 1.0):
        exact = times[max(0, -(-int(share * 100_000) * len(times) // 100_000) - 1)]
        assert counted.at(share) == pytest.approx(exact, rel=RELATIVE_ERROR * 1.001)
    assert counted.total_ns == sum(times)
    assert len(counted._buckets) < 2_000
    assert Quantiles().at(0.5) == 0


def test_a_quantile_of_nothing_spent_is_zero() -> None:
    counted = Quantiles()
    for time in (0, -5, 0, 10):
        counted.add(time)
    assert counted.at(0.5) == 0
    assert counted.at(1.0) == pytest.approx(10, rel=RELATIVE_ERROR)
