"""What a report says of prompt tokens that were computed before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.tools.traces.analysis.report import TraceReport
from tandem.tools.traces.read.recording import Recording
from tandem.tools.traces.show.report import as_json, headline
from tests.support.traces import Tape


def report_of(folder: Path, *found: tuple[int, int]) -> TraceReport:
    """Texts of 100 prompt tokens, and how many of these the target and the drafter found."""
    tape = Tape()
    for number, (target, drafter) in enumerate(found, 1):
        told: dict[str, Any] = {
            "gen_ai__usage__input_tokens": 100,
            "gen_ai__usage__output_tokens": 5,
            "gen_ai__usage__cache_read__input_tokens": target,
            "tandem__drafter_cached_tokens": drafter,
        }
        tape.span("orchestrator", "generate", 0, 10, kind="SERVER", trace=number, **told)
    return TraceReport.of(Recording([str(tape.write(folder / "trace.jsonl"))]))


def test_prompt_tokens_and_those_that_were_found_add_up(tmp_path: Path) -> None:
    report = report_of(tmp_path, (0, 0), (64, 80))
    told = as_json(report)
    assert (told["prompt_tokens"], told["cached_tokens"]) == (200, 64)
    assert told["drafter_cached_tokens"] == 80
    assert "of 200 prompt tokens targets found 64 computed, drafters 80" in headline(report)


def test_where_none_were_found_nothing_is_said(tmp_path: Path) -> None:
    assert "computed" not in headline(report_of(tmp_path, (0, 0)))
