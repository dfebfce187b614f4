"""How ghz's JSON is read, and which faults of a load are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.failure import Failure, Misconfigured
from tandem.rpc.endpoint import Endpoint
from tandem.telemetry.metrics import catalog as metrics
from tandem.tools.cli.display.load import require
from tandem.tools.cli.load_services import services
from tandem.tools.load.ghz import report, table
from tandem.tools.load.ghz.calls import Calls, read
from tandem.tools.load.ghz.campaign import Campaign
from tandem.tools.load.ghz.outcome import Outcome
from tandem.tools.load.ghz.scenario import Scenario, scenarios
from tandem.tools.load.ghz.served import ServedCounts, Watch
from tandem.tools.load.objective import Objective
from tandem.tools.watch.figures import figures
from tandem.tools.watch.histogram import Histogram
from tandem.tools.watch.scrape import Scrape
from tests.support.repository import ROOT


def detail(end_s: float, latency_s: float, status: str = "OK") -> dict[str, Any]:
    return {
        "timestamp": f"2026-11-22T10:00:{end_s:012.9f}Z",
        "latency": int(latency_s * 1e9),
        "error": "" if status == "OK" else f"rpc error: code = {status} desc = x",
        "status": status,
    }


def ghz_report(*details: dict[str, Any], **further: Any) -> dict[str, Any]:
    statuses: dict[str, int] = {}
    errors: dict[str, int] = {}
    for each in details:
        statuses[each["status"]] = statuses.get(each["status"], 0) + 1
        if each["error"]:
            errors[each["error"]] = errors.get(each["error"], 0) + 1
    return {
        "count": len(details),
        # As ghz has them, over failed calls too: never to be read.
        "average": 1,
        "rps": 1e9,
        "statusCodeDistribution": statuses,
        "errorDistribution": errors,
        "details": list(details),
        **further,
    }


TWO_AND_A_FAILURE = ghz_report(
    detail(3.0, 1.0), detail(2.5, 2.0), detail(4.25, 0.25, "Unavailable")
)


def test_calls_are_told_by_their_starts() -> None:
    calls = Calls.parse(TWO_AND_A_FAILURE)
    assert [round(call.started_s, 6) for call in calls.calls] == [0, 1.5, 3.5]
    assert calls.wall_s == pytest.approx(3.75)
    assert calls.count == 3
    latency = calls.latency(("OK",))
    assert latency is not None
    assert latency.mean == pytest.approx(1500)
    assert calls.slower(1.5, ("OK",)) == 1
    assert calls.errors == {"rpc error: code = Unavailable desc = x": 1}


@pytest.mark.parametrize("digits", ["", ".1", ".123456789", ".12345678901"])
def test_stamps_of_any_precision_are_read(digits: str) -> None:
    stamp = {**detail(1, 1), "timestamp": f"2026-11-22T10:00:05{digits}+01:00"}
    assert Calls.parse(ghz_report(stamp)).wall_s == pytest.approx(1)


def scenario(**config: Any) -> Scenario:
    return Scenario("name", Path("name.json"), {"call": "a.B.Generate", **config})


def test_a_gate_is_on_statuses() -> None:
    outcome = Outcome.of(scenario(), Calls.parse(TWO_AND_A_FAILURE))
    assert outcome.faults == ["1 of 3 calls failed: 1 Unavailable"]
    assert outcome.reasons == ["1 x rpc error: code = Unavailable desc = x"]
    assert Outcome.of(scenario(), Calls.parse(ghz_report())).faults == ["no call was counted"]
    assert Outcome.of(scenario(), Calls.parse(ghz_report(detail(2, 1)))).faults == []


def test_cancels_are_errors_only_where_ghz_did_not_cut() -> None:
    calls = Calls.parse(ghz_report(detail(2, 1, "Canceled"), detail(3, 2, "Canceled")))
    assert Outcome.of(scenario(), calls).failed == 2
    storm = Outcome.of(scenario(**{"stream-call-duration": "50ms"}), calls, left_open=0)
    assert storm.faults == []
    assert storm.ttft is None
    assert storm.reasons == []
    first = Outcome.of(scenario(**{"stream-call-count": 1}), calls)
    assert first.ttft is not None
    assert first.ttft.mean == pytest.approx(1500)
    left = Outcome.of(scenario(**{"stream-call-count": 1}), calls, left_open=2)
    assert left.faults == ["2 texts and sequences were left open"]


def test_flags_are_what_is_run() -> None:
    """A report that said 8 at a time where 32 were would be wrong."""
    closed = scenario(concurrency=8).under({"concurrency": "32", "total": "400"})
    assert closed.loop == "32 at a time"
    assert closed.under({"stream-call-count": "1"}).first_token_only
    assert closed.under({"stream-call-duration": "50ms"}).cuts


def test_calls_are_kept_where_a_service_dies_under_the_load(tmp_path: Path) -> None:
    """Its metrics are gone with it, and what clients saw of that is what the load is for."""

    class Died(Watch):
        def left_open(self, seconds: float) -> int:
            raise Failure("no metrics at b:2: Connection refused")

    report = json.dumps(TWO_AND_A_FAILURE)
    ghz = tmp_path / "ghz"
    ghz.write_text(f"#!/bin/sh\nwhile [ $1 != --output ]; do shift; done\necho '{report}' > $2\n")
    ghz.chmod(0o755)
    ran = Scenario("name", tmp_path / "own.json", {"call": "a.B.Generate"})
    ran.path.write_text(json.dumps(ran.config))
    outcome = Campaign(str(ghz), Endpoint("a:1"), Died([]), tmp_path, {}).run(ran)
    assert outcome.faults == [
        "no metrics at b:2: Connection refused",
        "1 of 3 calls failed: 1 Unavailable",
    ]
    assert outcome.as_json(Objective())["statuses"] == {"OK": 2, "Unavailable": 1}
    with pytest.raises(Misconfigured, match="b:2: Connection refused; name them with --metrics"):
        Died([]).require()


def test_a_report_that_cannot_be_written_is_no_load(tmp_path: Path) -> None:
    require(tmp_path / "new" / "folder")
    (tmp_path / "file").touch()
    with pytest.raises(Misconfigured, match="Not a directory"):
        require(tmp_path / "file" / "folder")


def test_metrics_of_services_that_are_away_are_not_those_of_ours(tmp_path: Path) -> None:
    """The embedded pair would be loaded in their stead, and nobody would see it."""
    at = ["127.0.0.1:1"]
    with (
        pytest.raises(Failure, match="no orchestrator answers"),
        services("127.0.0.1:1", at, must_measure=False, log_dir=tmp_path),
    ):
        pass


def served(ttft: dict[float, float], tpot: dict[float, float]) -> ServedCounts:
    empty = {"x": Scrape(0.0, {})}
    return ServedCounts(figures(empty, empty), 100.0, Histogram(ttft), Histogram(tpot))


def test_goodput_is_what_surely_kept_the_objective() -> None:
    calls = Calls.parse(ghz_report(*(detail(second, 0.5) for second in range(1, 11))))
    inf = float("inf")
    # Two first tokens and one pace share a bucket with their limit, or lie above.
    seen = served({0.5: 7.0, 1.0: 8.0, 2.0: 9.0, inf: 10.0}, {0.1: 9.0, inf: 10.0})
    goodput = Outcome.of(scenario(), calls, seen).goodput(Objective(1500, 100))
    assert goodput is not None
    assert goodput.share == pytest.approx(0.7)
    assert goodput.texts_per_s == pytest.approx(7 / calls.wall_s)
    assert not goodput.held
    late = Outcome.of(scenario(), calls, seen).goodput(Objective(1500, 100, 499))
    assert late is not None
    assert late.share == 0
    # A call that nobody saw the first token of was not seen to be in time.
    unseen = served({1.0: 4.0, inf: 4.0}, {inf: 0.0})
    goodput = Outcome.of(scenario(), calls, unseen).goodput(Objective(1000, 100))
    assert goodput is not None
    assert goodput.share == pytest.approx(0.4)
    assert Outcome.of(scenario(), calls).goodput(Objective()) is None


def test_quantiles_are_straight_between_bounds() -> None:
    found = Histogram({1.0: 5.0, 3.0: 10.0, float("inf"): 10.0})
    assert found.quantile(0.5) == 1.0
    assert found.quantile(0.75) == 2.0
    assert Histogram({1.0: 0.0, float("inf"): 4.0}).quantile(0.5) == 1.0
    assert Histogram({}).quantile(0.5) is None
    assert (found.surely_within(2.9), found.surely_within(3.0)) == (5.0, 10.0)


def test_a_histogram_is_of_all_services_together() -> None:
    name = f"{metrics.TIME_TO_FIRST_TOKEN.prometheus_name}_bucket"
    scrapes = [
        Scrape(
            0.0, {(name, frozenset({("le", "0.5")})): 1.0, (name, frozenset({("le", "+Inf")})): n}
        )
        for n in (1.0, 3.0)
    ]
    found = Histogram.of(metrics.TIME_TO_FIRST_TOKEN, scrapes)
    assert found.counts == {0.5: 2.0, float("inf"): 4.0}


def test_reports_say_what_is_wrong_and_ask_nobody(tmp_path: Path) -> None:
    outcome = Outcome.of(scenario(), Calls.parse(TWO_AND_A_FAILURE))
    nothing = Outcome("nobody", "-", Calls((), {}, {}, 0.0), trouble="ghz could not <run>")
    objective = Objective()
    page = report.write([outcome, nothing], [], objective, "127.0.0.1:1", tmp_path).read_text()
    for word in ("1 of 3 calls failed", "ghz could not &lt;run&gt;", "How calls ended", "<svg"):
        assert word in page
    addresses = set(page.split('"')) & {"http://www.w3.org/2000/svg"}
    assert page.count("http") == page.count("http://www.w3.org/"), addresses
    assert "1 of 3 calls failed" in (tmp_path / "report.md").read_text()
    found = json.loads((tmp_path / "report.json").read_text())
    assert [load["statuses"] for load in found["loads"]] == [{"OK": 2, "Unavailable": 1}, {}]
    assert report.faults([outcome, nothing], [], objective) == ["2 of 2 loads failed: name, nobody"]
    assert table.rows([outcome], objective)[0][2] == "1"


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for content in ("[]", "{}", '{"details": [{}]}', "{"):
        path.write_text(content)
        with pytest.raises(Misconfigured, match="no JSON report of ghz"):
            read(path)
    with pytest.raises(Misconfigured, match="cannot read"):
        read(tmp_path / "nowhere.json")


def test_scenarios_are_chosen_by_name() -> None:
    folder = ROOT / "deploy" / "ghz"
    found = [scenario.name for scenario in scenarios(folder, [])]
    assert found == sorted(found, key=lambda name: ("cancel" in name or "first" in name, name))
    assert {"complete-closed", "generate-open", "generate-cancels"} <= set(found)
    (one,) = scenarios(folder, ["generate-steps"])
    assert (one.method, one.cuts, one.loop) == ("Generate", False, "2 to 8 a second")
    with pytest.raises(Misconfigured, match="no scenario 'nonsense'; there are complete-closed"):
        scenarios(folder, ["nonsense"])
    with pytest.raises(Misconfigured, match="no configuration"):
        scenarios(folder / "nowhere", [])
