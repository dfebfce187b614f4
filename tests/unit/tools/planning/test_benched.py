"""A measurement derived from summaries, compared with the values put into them."""

from __future__ import annotations

import pytest

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.peers.text.measures import TextTimes
from tandem.telemetry.stages import StageTimes
from tandem.tools.load.timeline import Timeline
from tandem.tools.planning.measured.benched import measured_from

_MS = 1_000_000


def text(gammas: list[int], accepted: list[int], stages: pb.Stages | None = None) -> Timeline:
    places = range(max(gammas))
    summary = pb.Summary(
        new_tokens=len(gammas) + sum(accepted),
        gammas=gammas,
        drafted_tokens=sum(gammas),
        accepted_per_position=[sum(count > place for count in accepted) for place in places],
        stages=stages,
    )
    return Timeline(0.0, 0.0, ((0.1, 1),), 1.0, "", summary)


def test_drafts_that_a_texts_end_has_cut_do_not_count_as_refused_behind_it() -> None:
    measured = measured_from([text([0, 4, 4, 2], [4, 4, 2]), text([0, 4, 1], [4, 1])])
    assert measured.shares[:4] == pytest.approx([1, 1, 1, 1])


def test_refused_drafts_count_at_the_places_that_they_had() -> None:
    measured = measured_from([text([0, 4, 4, 4, 4, 2, 2], [4, 3, 1, 0, 2, 0])])
    # Of six drafts four kept their first token; of the four long ones two their third.
    assert measured.shares[:4] == pytest.approx([4 / 6, 3 / 6, 2 / 4, 1 / 4])


def test_the_queue_of_a_prompt_is_no_part_of_an_opening() -> None:
    stages = pb.Stages(
        time_to_first_token_ns=30 * _MS,
        target_prefill_busy_ns=20 * _MS,
        target_prefill_queue_busy_ns=5 * _MS,
        target_prefill_gather_busy_ns=1 * _MS,
    )
    assert measured_from([text([0, 4], [4], stages)]).opening_s == pytest.approx(0.004)


def test_a_ledger_keeps_what_a_prompt_waited_for_at_its_target() -> None:
    times = TextTimes()
    for role in ("target", "drafter"):
        times.add_prefill(role, StageTimes(queue_ns=3, gather_ns=2, forward_ns=7, numbers_ns=1))
    assert times.busy_ns == {
        "target_prefill": 7,
        "target_prefill_queue": 3,
        "target_prefill_gather": 2,
        "drafter_prefill": 7,
    }
