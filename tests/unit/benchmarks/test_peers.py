"""The comparison with other engines: intervals, draft lengths, laws, workers. Needs no engine."""

from __future__ import annotations

import io
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.measure.vitals import cpu_seconds
from benchmarks.peers import __main__ as command
from benchmarks.peers import installation, report
from benchmarks.peers import roster as rosters
from benchmarks.peers.installation import Environment, install, run_logged
from benchmarks.peers.law import Law, common_start, compare, two_sample
from benchmarks.peers.plan import QUICK
from benchmarks.peers.protocol import Generate, Load, answer_all, ask_of, line_of
from benchmarks.peers.roster import Engine, Roster, named
from benchmarks.peers.spread import Spread, best_gammas, ratios
from benchmarks.peers.turns import Turns, jobs_of
from benchmarks.peers.way import Job, Measurement, Way
from benchmarks.peers.worker import EngineFailed, Worker
from tests.support.processes.peer_worker import Fake

FAKE = [sys.executable, "-m", "tests.support.processes.peer_worker"]
ASK = Generate(((1, 2), (3,)), (5, 6), 4, 1.0, 3)
LOAD = Load("target", "drafter", (0, 4), "float32")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    started = Worker(FAKE, tmp_path / "log")
    yield started
    started.quit()


class TestSpread:
    def test_an_interval_holds_the_median_as_often_as_it_says(self) -> None:
        rng = random.Random(1)
        hits = 0
        for _ in range(2000):
            spread = Spread.of([rng.random() for _ in range(12)])
            hits += spread.low <= 0.5 <= spread.high
        assert spread.confidence == pytest.approx(0.961, abs=1e-3)
        assert hits / 2000 == pytest.approx(spread.confidence, abs=0.015)

    def test_few_values_give_all_they_can(self) -> None:
        assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0, 0.0, 1)
        assert Spread.of([2.0, 1.0, 4.0]) == Spread(2.0, 1.0, 4.0, 0.75, 3)

    def test_ratios_are_of_the_turns_that_both_have(self) -> None:
        assert ratios({0: 2.0, 1: 9.0, 2: 8.0}, {0: 1.0, 2: 4.0}) == [2.0, 2.0]


class TestChoice:
    def test_a_slow_minute_chooses_nothing(self) -> None:
        """8 is the best in every turn, but has no text in the one fast turn."""
        speeds = {
            Way("a", 0): {0: 900.0},
            Way("a", 4): {0: 10.0, 1: 10.0, 2: 200.0},
            Way("a", 8): {0: 12.0, 1: 12.0},
            Way("b", 4): {0: 1.0},
        }
        assert best_gammas(speeds) == {"a": 8, "b": 4}

    def test_one_lucky_turn_chooses_nothing(self) -> None:
        speeds = {
            Way("a", 4): {0: 10.0, 1: 10.0, 2: 10.0},
            Way("a", 8): {0: 9.0, 1: 9.0, 2: 90.0},
        }
        assert best_gammas(speeds) == {"a": 4}


class TestLaw:
    def test_p_is_uniform_under_one_law(self) -> None:
        rng = random.Random(2)

        def sample() -> list[int]:
            return rng.choices(range(6), [8, 5, 3, 2, 1, 0.01], k=400)

        found = [two_sample("", sample(), sample()).p for _ in range(300)]
        assert sum(p < 0.1 for p in found) / 300 == pytest.approx(0.1, abs=0.06)
        assert sum(found) / 300 == pytest.approx(0.5, abs=0.06)

    def test_unequal_sizes(self) -> None:
        assert two_sample("", [0, 1] * 50, [0, 1] * 500).statistic == 0
        assert two_sample("", [0] * 100, [0] * 7).p == 1

    def test_a_known_statistic(self) -> None:
        found = two_sample("", [0] * 10 + [1] * 30, [0] * 20 + [1] * 20)
        assert found.statistic == pytest.approx(16 / 3)
        assert found.degrees == 1

    def test_a_dependence_between_neighbours_is_seen(self) -> None:
        """Every token has the same law in both; only pairs differ."""
        rng = random.Random(3)
        free = [(rng.randrange(2), rng.randrange(2)) for _ in range(500)]
        tied = [(x, x) for x in (rng.randrange(2) for _ in range(500))]
        assert compare(free, list(reversed(free))).holds
        found = compare(free, tied)
        assert not found.holds
        assert found.worst.what == "tokens 1 and 2"

    def test_rare_outcomes_share_a_cell(self) -> None:
        found = two_sample("", list(range(1000)), list(range(2000, 3000)))
        assert (found.degrees, found.p) == (0, 1.0)

    def test_where_texts_part(self) -> None:
        assert common_start((1, 2, 3, 4), (1, 2, 9, 4)) == 0.5
        assert common_start((1, 2), (1, 2)) == 1


class TestProtocol:
    def test_asks_survive_the_wire(self) -> None:
        assert ask_of(line_of(ASK)) == ASK
        assert ask_of(line_of(LOAD)) == LOAD
        assert ask_of('{"do": "quit"}') is None

    def test_what_fails_is_an_answer_and_the_next_ask_is_heard(self) -> None:
        lines = ["nonsense\n", '{"do": "dance"}\n', line_of(LOAD), line_of(ASK)]
        answers = io.StringIO()
        answer_all(
            Fake(), io.StringIO("".join([*lines, '{"do": "quit"}\n', line_of(ASK)])), answers
        )
        found = [json.loads(line) for line in answers.getvalue().splitlines()]
        assert ["error" in answer for answer in found] == [True, True, False, False]
        assert len(found[-1]["texts"]) == 2


class TestWorker:
    def test_it_loads_writes_and_may_print(self, worker: Worker) -> None:
        assert worker.ask(LOAD, 30)["versions"] == {"fake": "1"}
        found = worker.ask(ASK, 30)
        assert [len(text) for text in found["texts"]] == [3, 3]
        assert found["seconds"] > 0

    def test_an_error_is_told_and_it_goes_on(self, worker: Worker) -> None:
        with pytest.raises(EngineFailed, match="no such target"):
            worker.ask(Load("missing", "", (0,), "float32"), 30)
        assert worker.ask(LOAD, 30)["ok"]

    def test_one_that_ends_is_told_with_its_last_words(self, worker: Worker) -> None:
        with pytest.raises(EngineFailed, match="last words"):
            worker.ask(Load("crash", "", (0,), "float32"), 30)

    def test_one_that_hangs_is_ended(self, worker: Worker) -> None:
        with pytest.raises(EngineFailed, match="within"):
            worker.ask(Load("hang", "", (0,), "float32"), 0.5)

    def test_one_that_spins_is_stopped_between_asks(self, tmp_path: Path) -> None:
        spinning = Worker(FAKE, tmp_path / "log", pauses=True)
        try:
            spinning.ask(Load("spin", "", (0,), "float32"), 30)
            for _ in range(2):
                before = cpu_seconds(spinning.id)
                time.sleep(0.5)
                assert cpu_seconds(spinning.id) - before < 0.03
                assert spinning.ask(ASK, 30)["texts"]
        finally:
            spinning.quit()


class TestInstallation:
    def test_what_is_there_is_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(installation, "CACHE", tmp_path)
        environment = Environment("fake", ("one",), ("two",))
        python = Path(environment.python)
        python.parent.mkdir(parents=True)
        python.touch()
        (environment.folder / "ready").write_text("one\ntwo")
        install(environment, 1, pytest.fail)

    def test_a_full_disk_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(installation, "CACHE", tmp_path)
        with pytest.raises(EngineFailed, match="GB free"):
            install(Environment("fake", ("one",), needs_gb=1e9), 1, pytest.fail)

    def test_a_command_is_bounded_and_its_end_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(EngineFailed, match="more than"):
            run_logged(["sleep", "30"], tmp_path / "log", 0.1)
        with pytest.raises(EngineFailed, match="no package"):
            run_logged(["sh", "-c", "echo no package; exit 1"], tmp_path / "log", 10)
        with pytest.raises(EngineFailed):
            run_logged(["there-is-no-such-program"], tmp_path / "log", 10)


def fake(name: str, target: str = "", apart: bool = False) -> tuple[Engine, dict[str, str]]:
    engine = Engine(name, "tests.support.processes.peer_worker", apart=apart)
    return engine, {"target": target or "target", "drafter": "drafter"}


class TestRoster:
    def test_what_does_not_fit_into_memory_takes_no_part(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rosters, "CACHE", tmp_path)
        monkeypatch.setattr(rosters, "free_memory", lambda device: 1 << 30)
        roster, (engine, folders) = Roster(), fake("large", apart=True)
        roster.start(engine, folders, QUICK, "float32", lambda said: None)
        assert not roster.workers
        assert roster.failures == {
            "large, plain": "too little memory is free; name fewer --engines"
        }

    def test_a_whole_contest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One engine is right, one skewed with drafts, one crashes, one fails midway."""
        monkeypatch.setattr(rosters, "CACHE", tmp_path)
        roster, said = Roster(), list[str]()
        for name, target in (("Tandem", ""), ("skewed", "skewed"), ("gone", "crash")):
            engine, folders = fake(name, target)
            roster.start(engine, folders, QUICK, "float32", said.append)
        engine, folders = fake("late", "fails at 8", apart=True)
        roster.start(engine, folders, QUICK, "float32", said.append)
        plan = replace(QUICK, law_texts=400, turns=3, budget_s=60)
        try:
            outcome = command.contest(plan, roster, [(1,), (2, 3)], said.append)
        finally:
            roster.close()
        assert set(roster.failures) == {"gone", "late, drafts of 8"}
        assert outcome.laws["Tandem"].holds
        assert not outcome.laws["skewed"].holds
        assert set(outcome.measured) == set(jobs_of(plan))
        assert all(best["late"] == 4 for best in outcome.choices.values())
        console = Console(record=True, width=160, file=io.StringIO())
        command.show(plan, outcome, console)
        text = console.export_text()
        assert "NO, another law" in text
        assert "late, drafts of 8 took no part" in text
        found = json.loads(json.dumps(command.as_json(plan, "float32", outcome)))
        assert len(found["measured"]) == sum(map(len, outcome.measured.values()))

    def test_names(self) -> None:
        assert named("openvino").name == "OpenVINO GenAI"
        assert [named(name).name for name in ("vLLM", "Tandem")] == ["vLLM", "Tandem"]
        with pytest.raises(ValueError, match="no engine"):
            named("nobody")


def measured(*speeds: float, text: tuple[int, ...] = (1, 2, 3, 4)) -> list[Measurement]:
    return [Measurement(turn, len(text) / speed, (text,)) for turn, speed in enumerate(speeds)]


class TestReport:
    def test_the_strongest_exact_peer_is_first_and_everyones_measure(self) -> None:
        job = Job(1.0, 1, 4)
        ways = {
            Way("Tandem", 4): measured(30, 30, 30),
            Way("peer", 0): measured(20, 10, 20),
            Way("peer", 4): measured(90, 90, 90),
            Way("other", 0): measured(15, 15, 15),
        }
        laws = {
            "Tandem": compare([(1, 1)] * 50, [(1, 1)] * 50),
            "peer": compare([(1, 1)] * 50, [(2, 2)] * 50),
        }
        (section,) = report.sections({job: ways}, laws)
        assert section.strongest == Way("peer", 0)
        assert [row.way for row in section.rows] == [
            Way("peer", 0),
            Way("peer", 4),
            Way("Tandem", 4),
            Way("other", 0),
        ]
        tandem = section.rows[2]
        assert tandem.ratio is not None
        assert tandem.ratio.median == 1.5
        assert [row.exact for row in section.rows] == [True, False, True, True]

    def test_greedy_texts_are_held_to_the_plain_ones(self) -> None:
        job, laws = Job(0.0, 1, 4), dict[str, Law]()
        ways = {
            Way("a", 0): measured(1),
            Way("a", 4): measured(2, text=(1, 2, 3, 9)),
            Way("b", 0): measured(1),
            Way("b", 4): measured(2, text=(9, 2, 3, 4)),
        }
        verdicts = {way: report.exactness(way, job, ways, laws)[0] for way in ways}
        assert verdicts == {way: way != Way("b", 4) for way in ways}

    def test_what_was_not_tested_is_no_exact_peer(self) -> None:
        job = Job(1.0, 1, 4)
        (section,) = report.sections({job: {Way("peer", 4): measured(5.0)}}, {})
        assert section.strongest is None
        assert section.rows[0].exact is None


def test_turns_ask_all_ways_for_the_same() -> None:
    asked: list[tuple[Way, Generate]] = []

    class Recorder(Roster):
        def generate(self, way: Way, ask: Generate, turn: int = 0) -> Measurement:
            asked.append((way, ask))
            return Measurement(turn, 1.0, ((0,) * ask.new_tokens,) * len(ask.prompts))

    roster = Recorder()
    roster.engines = {name: fake(name)[0] for name in "ab"}
    roster.workers = dict.fromkeys((Way("a", 0), Way("b", 0)))  # type: ignore[assignment]
    turns = Turns(roster, [(1,), (2,), (3,)], lambda _: None)
    jobs = jobs_of(QUICK)
    found = turns.measure(QUICK, {job: {} for job in jobs}, 60)
    assert all(len(own) == QUICK.turns for ways in found.values() for own in ways.values())
    assert [asked[i][0].engine for i in (0, 2 * len(jobs))] == ["a", "b"]
    for (_, one), (_, other) in zip(asked[::2], asked[1::2], strict=True):
        assert (one.prompts, one.seeds) == (other.prompts, other.seeds)
