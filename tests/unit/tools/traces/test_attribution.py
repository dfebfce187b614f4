"""Every instant of a request belongs to exactly one stage."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tandem.tools.traces.analysis import attribution
from tandem.tools.traces.analysis.attribution import OwnedInterval, segments
from tandem.tools.traces.analysis.stages import (
    DRAFTER,
    ORCHESTRATOR,
    OWN,
    STAGES,
    TARGET,
    OwnedStage,
)
from tandem.tools.traces.read.recording import Recording
from tandem.tools.traces.read.request import TracedRequest
from tests.support.traces import COSTS, MS, Tape, request, request_ms


def only(tape: Tape, folder: Path) -> TracedRequest:
    (found,) = Recording([str(tape.write(folder / "trace.jsonl"))]).requests()
    return found


def milliseconds(path: list[OwnedInterval]) -> dict[str, float]:
    """By stage, as `service name`."""
    spent: Counter[str] = Counter()
    for segment in path:
        spent[str(segment.stage)] += segment.duration_ns
    return {stage: ns / MS for stage, ns in spent.items()}


def check_partition(found: TracedRequest, path: list[OwnedInterval]) -> None:
    assert path[0].start_ns == found.root.start_ns
    assert path[-1].end_ns == found.root.end_ns
    for earlier, later in pairwise(path):
        assert earlier.start_ns < earlier.end_ns == later.start_ns
    assert {segment.stage for segment in path} <= set(STAGES)


def test_a_request_of_known_times(tmp_path: Path) -> None:
    tape = Tape()
    request(tape, [(2, 1), (3, 3)])
    found = only(tape, tmp_path)
    path = segments(found)
    check_partition(found, path)
    assert found.wall_ns == request_ms([(2, 1), (3, 3)]) * MS
    assert milliseconds(path) == pytest.approx(
        {
            "orchestrator tokenize": 1,
            "orchestrator open.else": 1,
            "target prefill.network": 1,
            "target prefill.queue": 0.5,
            "target prefill.gather": 0.5,
            "target prefill.forward": 6,
            "target prefill.accept": 0.5,
            "target prefill.else": 0.5,
            "drafter draft.network": 2,
            "drafter draft.queue": 0.5,
            "drafter draft.gather": 0.625,
            "drafter draft.forward": 5,
            "drafter draft.draw": 1.25,
            "drafter draft.reply": 0.5,
            "target verify.network": 2,
            "target verify.queue": 0.5,
            "target verify.gather": 1,
            "target verify.forward": 10,
            "target verify.accept": 1.5,
            "target verify.else": 0.5,
            "orchestrator round.else": 2,
            "orchestrator detokenize": 2,
            "orchestrator close": 1,
            "orchestrator own": 1,
        }
    )


def test_what_goes_on_side_by_side(tmp_path: Path) -> None:
    """A prefill that the first round waits for owns the wait, and only that; of calls the last."""
    tape = Tape()
    root = tape.span("orchestrator", "generate", 0, 50, kind="SERVER")
    opening = tape.span("orchestrator", "open", 0, 10, root)
    tape.span("orchestrator", "call.prefill", 0, 9, opening, "CLIENT")
    late = tape.span("orchestrator", "call.prefill", 0, 20, root, "CLIENT")
    prefill = tape.span("drafter", "prefill", 1, 19, late, "SERVER")
    tape.span("drafter", "prefill.forward", 2, 18, prefill)
    round_ = tape.span("orchestrator", "round", 12, 50, root)
    tape.span("orchestrator", "call.draft", 21, 40, round_, "CLIENT")
    tape.span("orchestrator", "call.verify", 24, 49, round_, "CLIENT")
    found = only(tape, tmp_path)
    path = segments(found)
    check_partition(found, path)
    assert milliseconds(path) == {
        "target prefill.unseen": 9,
        "orchestrator open.else": 1,
        "orchestrator own": 2,
        "drafter prefill.forward": 6,
        "drafter prefill.else": 1,
        "drafter prefill.network": 1,
        "orchestrator round.else": 2,
        "drafter draft.unseen": 3,
        "target verify.unseen": 25,
    }


def test_a_trace_without_clients_gather_and_passes(tmp_path: Path) -> None:
    """As services wrote them before: a service's span lies below the round itself."""
    tape = Tape()
    root = tape.span("orchestrator", "generate", 0, 30, kind="SERVER")
    round_ = tape.span("orchestrator", "round", 5, 30, root)
    draft = tape.span("drafter", "draft", 6, 12, round_, "SERVER")
    tape.span("drafter", "draft.queue", 6, 7, draft)
    tape.span("drafter", "draft.forward", 7, 10, draft)
    verify = tape.span("target", "verify", 14, 29, round_, "SERVER")
    tape.span("target", "verify.forward", 15, 25, verify)
    tape.span("target", "verify.new_part", 25, 28, verify)
    found = only(tape, tmp_path)
    path = segments(found)
    check_partition(found, path)
    assert milliseconds(path) == {
        "orchestrator own": 5,
        "orchestrator round.else": 4,
        "drafter draft.queue": 1,
        "drafter draft.forward": 3,
        "drafter draft.else": 2,
        "target verify.forward": 10,
        "target verify.else": 5,
    }


def test_a_prefill_on_another_target_in_a_round_is_the_targets(tmp_path: Path) -> None:
    tape = Tape()
    root = tape.span("orchestrator", "generate", 0, 10, kind="SERVER")
    round_ = tape.span("orchestrator", "round", 0, 10, root)
    call = tape.span("orchestrator", "call.prefill", 0, 10, round_, "CLIENT")
    tape.span("target", "prefill", 1, 9, call, "SERVER")
    path = segments(only(tape, tmp_path))
    assert milliseconds(path) == {"target prefill.network": 2, "target prefill.else": 8}


@pytest.mark.parametrize("seed", range(20))
def test_any_tree_is_cut_without_gap_or_overlap(seed: int, tmp_path: Path) -> None:
    """Children that overlap, outlast their parents, or have no length."""
    numbers = random.Random(seed)
    tape = Tape()
    ids = [tape.span("orchestrator", "generate", 0, 100, kind="SERVER")]
    names = ["open", "round", "call.prefill", "draft", "draft.forward", "verify", "novel", "close"]
    for _ in range(60):
        start, lasts = numbers.uniform(-10, 105), numbers.choice([0, numbers.uniform(0, 40)])
        service = numbers.choice(["orchestrator", "drafter", "target"])
        name, parent = numbers.choice(names), numbers.choice(ids)
        ids.append(tape.span(service, name, start, start + lasts, parent))
    late = tape.span("orchestrator", "call.prefill", 0, 90, ids[0])
    tape.span("orchestrator", "round", 10, 80, late)
    found = only(tape, tmp_path)
    assert len(found.spans) == 63
    check_partition(found, segments(found))


def test_a_request_without_length_has_no_segments(tmp_path: Path) -> None:
    tape = Tape()
    tape.span("orchestrator", "generate", 0, 0, kind="SERVER")
    assert segments(only(tape, tmp_path)) == []


def first_ends_last(pieces: Callable[..., Any]) -> Callable[..., Any]:
    """A sweep that takes the child that ends first for what is waited for."""

    def mutant(spans: Any, start: int, end: int) -> Any:
        for piece in pieces(spans, start, end):
            open_ = [s for s in spans if s.start_ns <= piece.start_ns < s.end_ns]
            yield piece._replace(chosen=min(open_, key=lambda span: span.end_ns, default=None))

    return mutant


MUTANTS: dict[str, tuple[str, Any]] = {
    "the child that ends first is critical": ("_pieces", first_ends_last(attribution._pieces)),
    "nothing in the background is waited for": ("ROUND", "rounds"),
    "the drafter's prefill is waited for like all else": ("_BACKGROUND", frozenset()),
    "a call is the orchestrator's": ("CALL", "called."),
    "every prefill is the target's": ("_service", lambda request, span, step: TARGET),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_attributions_tests_find_a_mutant(
    mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_what_goes_on_side_by_side(tmp_path)
    monkeypatch.setattr(attribution, *MUTANTS[mutant])
    with pytest.raises(AssertionError):
        test_what_goes_on_side_by_side(tmp_path)


def test_stages_are_one_list_without_repeats() -> None:
    assert len(set(STAGES)) == len(STAGES)
    assert {stage.service for stage in STAGES} == {ORCHESTRATOR, DRAFTER, TARGET}
    assert OWN in STAGES
    assert OwnedStage(DRAFTER, "draft.forward").in_round
    assert not OwnedStage(DRAFTER, "prefill.forward").in_round
    assert COSTS.round_ms(1) < COSTS.round_ms(2)


def test_a_draft_that_the_target_made_is_the_targets(tmp_path: Path) -> None:
    tape = Tape()
    request(tape, [(2, 1), (3, 3)], inside=True)
    spent = milliseconds(segments(only(tape, tmp_path)))
    assert spent["target draft.forward"] == 5
    assert "drafter draft.forward" not in spent
