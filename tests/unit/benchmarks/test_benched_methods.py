"""The table of drafting methods: where greedy texts end, and what other drafters would give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.measure.greedy import LENGTH, TIMES, before_loop
from benchmarks.methods import COST_RATIOS, Figure, predict

LOOP = list(range(LENGTH))
PLAIN = Figure("model", "block", 0, 0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 4.0, 1.0, 200.0)


def test_a_text_ends_where_a_row_comes_for_the_third_time() -> None:
    head = [90, 91]
    assert before_loop(head + LOOP * (TIMES - 1)) == len(head) + LENGTH * (TIMES - 1)
    assert before_loop(head + LOOP * 9) == len(head) + LENGTH * TIMES
    assert before_loop([7] * 40) == LENGTH + TIMES - 1
    assert before_loop(list(range(300))) == 300
    assert before_loop([]) == 0


def test_other_drafters_are_predicted_from_the_times_of_this_one() -> None:
    drafted = replace(PLAIN, depth=4, nodes=4, tokens=3.0, draft_passes=4.0, pass_ms=5.0)
    plain, predicted = predict([PLAIN, drafted])
    assert plain.predicted == (200.0,) * len(COST_RATIOS)
    # Three tokens for the target's 5 ms, 1 ms beside the models, four passes of 4 ms / cost.
    assert predicted.predicted == pytest.approx([3e3 / (6 + 16 / cost) for cost in COST_RATIOS])
    assert predict([drafted]) == [drafted]
