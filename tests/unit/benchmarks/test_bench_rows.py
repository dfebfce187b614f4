"""What a line of the benchmark's table is made of."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from benchmarks.contest import report
from benchmarks.contest.floor import BareRound, Floor
from benchmarks.contest.method import Method, System
from benchmarks.contest.row import Row, floors, measured
from benchmarks.contest.run_off import ratios
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.timeline import Timeline


@pytest.fixture
def floor() -> Floor:
    """One that measured 10 ms for a plain round and 16 ms at gamma 4."""
    bare = Floor.__new__(Floor)
    bare.dtype, bare.target_bytes = "float32", 20_000_000
    bare.rounds = {0: BareRound([0.0], [0.010]), 4: BareRound([0.004], [0.012])}
    return bare


def text(gaps: list[tuple[float, int]], summary: pb.Summary | None = None) -> Timeline:
    now, arrivals = 0.0, []
    for gap, tokens in gaps:
        now += gap
        arrivals.append((now, tokens))
    return Timeline(0.0, 0.0, tuple(arrivals), now, summary=summary)


PLAIN = text([(0.02, 1)] * 10, pb.Summary(rounds=10, gammas=[0] * 10))
DRAFTED = text(
    [(0.02, 1), (0.02, 4), (0.02, 5)],
    pb.Summary(
        rounds=3,
        gammas=[0, 4, 4],
        accepted_tokens=7,
        drafted_tokens=8,
        draft_bytes=500,
        stages=pb.Stages(round_wall_ns=[20_000_000] * 2, round_model_ns=[19_000_000] * 2),
    ),
)
BLOCK = Method(System.TANDEM, "float32", 4, "block")


def test_a_row_of_tandem(floor: Floor) -> None:
    row = measured(BLOCK, 1.0, [DRAFTED, DRAFTED], [PLAIN, PLAIN], floor)
    assert row.name == "Tandem block"
    assert row.tokens_per_s == pytest.approx(10 / 0.06)
    assert row.to_plain == pytest.approx(0.2 / 0.06)
    assert row.block_efficiency == pytest.approx(4.5)
    assert row.predicted_to_plain == pytest.approx(4.5 * 10 / 16)
    assert row.round_to_floor == pytest.approx(20 / 16)
    assert row.acceptance == pytest.approx(7 / 8)
    assert row.bytes_per_token == 50
    assert row.target_calls == 3
    assert row.beside_models is not None
    assert row.beside_models.p50 == pytest.approx(1)


def test_a_row_of_transformers(floor: Floor) -> None:
    plain = text([(0.02, 1)] * 10)
    drafted = text([(0.03, 3), (0.03, 5), (0.03, 2)])
    assisted = Method(System.ASSISTED, "bfloat16", 4)
    row = measured(assisted, 0.0, [drafted], [plain], floor)
    assert row.target_calls == 3
    assert row.block_efficiency == pytest.approx(10 / 3)
    assert row.acceptance == pytest.approx(7 / 12)
    assert row.to_plain == pytest.approx(0.2 / 0.09)
    assert row.beside_models is None
    assert row.bytes_per_token is None
    assert row.round_to_floor is None
    own = Method(System.ASSISTED_DEFAULTS, "bfloat16", None)
    assert measured(own, 0.0, [drafted], [plain], floor).acceptance is None


def test_floors(floor: Floor) -> None:
    speeds = {
        (row.name, row.gamma): row.tokens_per_s for row in floors(floor, 4e9, {0: 1, 4: 3.2}, 1.0)
    }
    assert speeds == {
        ("floor in process", 0): pytest.approx(100),
        ("floor in process", 4): pytest.approx(200),
        ("floor of bandwidth", 0): pytest.approx(200),
        ("floor of bandwidth", 4): pytest.approx(640),
    }


def test_the_table_has_transformers_at_its_best_only(floor: Floor) -> None:
    rows = [
        Row(System.ASSISTED, dtype, gamma, 0.0, tokens_per_s)
        for dtype, gamma, tokens_per_s in (("float32", 2, 10.0), ("bfloat16", 4, 12.0))
    ]
    rows += [Row("Tandem block", "float32", gamma, 0.0, 15.0 + gamma) for gamma in (2, 4)]
    assert report.shown(rows) == rows[1:]
    console = Console(width=190, file=StringIO(), record=True)
    console.print(report.table(rows))
    text = console.export_text()
    assert "12.0" in text
    assert "10.0" not in text


def test_the_run_off_compares_the_best_with_the_best() -> None:
    two, four = (Method(System.TANDEM, "float32", gamma, "block") for gamma in (2, 4))
    assisted = [Method(System.ASSISTED, "bfloat16", gamma) for gamma in (4, 8)]
    own, plain = Method(System.ASSISTED_DEFAULTS, "float32", None), Method(System.GENERATE, "x")
    speeds = {
        two: [10.0, 11.0, 30.0],
        four: [15.0, 16.0, 24.0],  # the better median
        assisted[0]: [10.0, 8.0, 12.0],
        assisted[1]: [5.0, 9.0, 99.0],
        own: [15.0, 16.0, 24.0],
        plain: [1.0, 1.0, 1.0],
    }
    found = ratios(1.0, list(speeds), {(method, 1.0): own for method, own in speeds.items()})
    assert [(ratio.block, ratio.other) for ratio in found] == [
        (four, assisted[0]),
        (four, own),
        (four, plain),
    ]
    assert found[0].ratios == (1.5, 2.0, 2.0)
    sentence = str(found[0])
    assert "Tandem block (gamma 4, float32) is 2.00 x transformers assisted (gamma 4" in sentence
    assert "16.0 and 10.0 tokens/s; 3 texts each" in sentence
