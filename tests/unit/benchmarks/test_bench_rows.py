"""How a line of the benchmark's table is computed."""

from __future__ import annotations

from argparse import ArgumentTypeError
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.bench import report
from benchmarks.bench.__main__ import ratios_of, rows_of
from benchmarks.bench.floor import BareRound, Floor
from benchmarks.bench.row import DEFAULTS, Row, floors, measured
from benchmarks.measure.environment import result_file
from benchmarks.peers.way import Job, Measurement, Way
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.load.timeline import Timeline


@pytest.fixture
def floor() -> Floor:
    """One that measured 10 ms for a plain round and 16 ms at gamma 4."""
    bare = Floor.__new__(Floor)
    bare.dtype, bare.target_bytes, bare.bandwidth = "float32", 20_000_000, 4e9
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
BLOCK = Way("Tandem", 4, "block")


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
    assisted = Way("transformers", 4, "assisted")
    row = measured(assisted, 0.0, [drafted], [plain], floor)
    assert row.target_calls == 3
    assert row.block_efficiency == pytest.approx(10 / 3)
    assert row.acceptance == pytest.approx(7 / 12)
    assert row.to_plain == pytest.approx(0.2 / 0.09)
    assert row.beside_models is None
    assert row.bytes_per_token is None
    assert row.round_to_floor is None
    own = Way("transformers", 20, DEFAULTS)
    assert measured(own, 0.0, [drafted], [plain], floor).acceptance is None


def test_floors(floor: Floor) -> None:
    speeds = {(row.name, row.gamma): row.tokens_per_s for row in floors(floor, {0: 1, 4: 3.2}, 1.0)}
    assert speeds == {
        ("floor in process", 0): pytest.approx(100),
        ("floor in process", 4): pytest.approx(200),
        ("floor of bandwidth", 0): pytest.approx(200),
        ("floor of bandwidth", 4): pytest.approx(640),
    }


def test_the_table_has_transformers_at_its_best_only(floor: Floor) -> None:
    rows = [
        Row("transformers assisted", gamma, 0.0, tokens_per_s)
        for gamma, tokens_per_s in ((2, 10.5), (4, 12.5))
    ]
    rows += [Row("Tandem block", gamma, 0.0, 15.0 + gamma) for gamma in (2, 4)]
    assert report.shown(rows) == rows[1:]
    console = Console(width=190, file=StringIO(), record=True)
    console.print(report.table(rows))
    text = console.export_text()
    assert "12.5" in text
    assert "10.5" not in text


def test_a_table_has_every_way_and_the_floors_at_its_block_efficiency(floor: Floor) -> None:
    job, plain = Job(1.0, 1, 10), text([(0.02, 1)] * 10)
    ways = {
        Way("Tandem", 0): PLAIN,
        BLOCK: DRAFTED,
        Way("transformers", 0): plain,
        Way("transformers", 4, "assisted"): text([(0.03, 3), (0.03, 7)]),
    }
    found = {
        way: [Measurement(0, 1.0, ((0,) * 10,), timelines=(own,))] for way, own in ways.items()
    }
    rows = rows_of({job: found}, floor)
    assert [row.name for row in rows[:4]] == [way.family for way in ways]
    speeds = {(row.name, row.gamma): row.tokens_per_s for row in rows[4:]}
    assert speeds["floor in process", 4] == pytest.approx(4.5 / 0.016)
    assert [row.to_plain for row in rows[2:4]] == pytest.approx([1, 0.2 / 0.06])


def test_the_run_off_has_block_over_every_way_of_transformers() -> None:
    speeds = {
        BLOCK: [15.0, 16.0, 24.0],
        Way("Tandem", 4, "token"): [99.0, 99.0, 99.0],
        Way("transformers", 4, "assisted"): [10.0, 8.0, 12.0],
        Way("transformers", 20, DEFAULTS): [15.0, 16.0, 24.0],
        Way("transformers", 0): [1.0, 1.0, 1.0],
    }
    ways = {
        way: [Measurement(turn, 10 / speed, ((0,) * 10,)) for turn, speed in enumerate(own)]
        for way, own in speeds.items()
    }
    found = list(ratios_of({Job(1.0, 1, 10): ways}))
    assert [(ratio.block, ratio.other) for ratio in found] == [
        (BLOCK, way) for way in speeds if way.engine == "transformers"
    ]
    assert (found[0].ratio.low, found[0].ratio.median, found[0].ratio.high) == (1.5, 2.0, 2.0)
    sentence = str(found[0])
    assert "Tandem block, drafts of 4 is 2.00 x transformers assisted, drafts of 4" in sentence
    assert "16.0 and 10.0 tokens/s; 3 texts each" in sentence


def test_a_folder_cannot_be_the_file_of_results(tmp_path: Path) -> None:
    """Said before a long run, not at its end."""
    with pytest.raises(ArgumentTypeError, match="is a folder; name a file"):
        result_file(str(tmp_path))
    assert result_file(str(tmp_path / "rows.json")) == tmp_path / "rows.json"
