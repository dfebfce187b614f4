"""What a report says of drafts that were prepared, and how often outcomes are foreseen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.tools.traces.analysis.report import TraceReport
from tandem.tools.traces.prediction.basis import Basis
from tandem.tools.traces.prediction.speculation import foreseen
from tandem.tools.traces.prediction.whatif import Outlook
from tandem.tools.traces.read.recording import Recording
from tandem.tools.traces.show.report import as_json, tables
from tests.support.traces import Tape, recorded

VERIFY_MS = 20.0


def record(folder: Path, rounds: Sequence[tuple[str, float]]) -> Path:
    """A text: of each round what became of its draft, and the call's time; 0 for no call."""
    tape = Tape()
    ends = sum(draft_ms + VERIFY_MS for _, draft_ms in rounds)
    root = tape.span("orchestrator", "generate", 0, ends, kind="SERVER")
    at = 0.0
    for number, (came, draft_ms) in enumerate(rounds, 1):
        said: dict[str, Any] = {"tandem__round": number, "tandem__depth": 4, "tandem__accepted": 2}
        if came:
            said |= {"tandem__prepared": came, "tandem__prepared__drafts": 16}
        end = at + draft_ms + VERIFY_MS
        round_ = tape.span("orchestrator", "round", at, end, root, **said)
        for step, lasts in (("draft", draft_ms), ("verify", VERIFY_MS)):
            if not lasts:
                continue
            call = tape.span("orchestrator", f"call.{step}", at, at + lasts, round_, "CLIENT")
            service = "drafter" if step == "draft" else "target"
            tape.span(service, step, at, at + lasts, call, "SERVER")
            at += lasts
    return tape.write(folder / "trace.jsonl")


def test_outcomes_hidden_time_and_waste_are_counted(tmp_path: Path) -> None:
    rounds = [("", 12.0), ("miss", 12.0), ("hit", 0.0), ("hit", 2.0), ("late", 7.0), ("miss", 14.0)]
    report = TraceReport.of(Recording([str(record(tmp_path, rounds))]))
    ahead = report.ahead
    assert dict(ahead.rounds) == {"miss": 2, "hit": 2, "late": 1, "": 1}
    assert ahead.mean_ns("miss") == pytest.approx(13e6)
    assert ahead.mean_ns("hit") == pytest.approx(1e6)
    assert ahead.hidden_ns == pytest.approx((2 * 12 + 6) * 1e6)
    assert ahead.drafts == 5 * 16
    assert ahead.thrown_away == pytest.approx(1 - 3 / 80)
    told = as_json(report)["ahead"]
    assert told["rounds"] == {"miss": 2, "hit": 2, "late": 1}
    assert told["hidden_ms"] == pytest.approx(30)
    (table,) = [one for one in tables(report) if str(one.title).startswith("Drafts ahead")]
    assert "18.0% of the wall time hidden, 96% of 80 prepared drafts thrown away" in str(
        table.title
    )


def test_where_all_were_ready_other_rounds_say_what_that_saves(tmp_path: Path) -> None:
    rounds = [("", 12.0), ("hit", 0.0), ("hit", 2.0)]
    report = TraceReport.of(Recording([str(record(tmp_path, rounds))]))
    assert report.ahead.hidden_ns == pytest.approx((12 + 10) * 1e6)


def test_without_prepared_drafts_nothing_is_said_of_them(tmp_path: Path) -> None:
    report = TraceReport.of(Recording([str(record(tmp_path, [("", 12.0)] * 3))]))
    assert (report.ahead.total, report.ahead.hidden_ns, report.ahead.thrown_away) == (0, 0, 0)
    assert not [one for one in tables(report) if str(one.title).startswith("Drafts ahead")]


def test_who_drafts_ahead_is_not_told_to(tmp_path: Path) -> None:
    alone = Outlook(
        Basis(Recording([str(recorded(tmp_path / "a.jsonl", 3, [(4, 3)] * 20))]), None, None)
    )
    assert [one for one in alone.changes if "ahead" in one.change]
    path = record(tmp_path, [("hit", 0.0), ("miss", 12.0)] * 20)
    ahead = Outlook(Basis(Recording([str(path)]), None, None))
    assert not [one for one in ahead.changes if "ahead" in one.change]


def test_what_shared_passes_would_lose_is_not_predicted(tmp_path: Path) -> None:
    path = recorded(tmp_path / "a.jsonl", 3, [(4, 3)] * 20, batch=4)
    outlook = Outlook(Basis(Recording([str(path)]), None, None))
    (ahead,) = [one for one in outlook.changes if "ahead" in one.change]
    assert ahead.factor is None
    assert "record a load of one client" in ahead.assumption


def test_as_many_outcomes_are_foreseen_as_acceptance_lets() -> None:
    # Always kept: only the token after the draft is to be guessed.
    assert foreseen([1.0] * 5, 4, greedy=True) == pytest.approx(1.0)
    assert foreseen([1.0] * 5, 4, greedy=False) == pytest.approx(0.9)
    # Never kept: nothing is known of what the target wants.
    assert foreseen([0.0] * 5, 4, greedy=True) == 0
    kept = [0.8**place for place in range(1, 6)]
    greedy, sampled = (foreseen(kept, 4, greedy) for greedy in (True, False))
    assert greedy == pytest.approx((1 - kept[3]) * 0.8 + kept[3] * 0.88)
    assert sampled == pytest.approx((1 - kept[3]) * 0.36 + kept[3] * 0.72)
