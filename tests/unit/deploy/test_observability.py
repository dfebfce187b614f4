"""Every query in our rules, dashboard and docs asks for metrics that the services export."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tandem.telemetry.metrics.catalog import METRICS, MetricKind, underscored
from tests.support.repository import ROOT

FOLDER = ROOT / "deploy" / "observability"
RULES = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
NAME = re.compile(r"\b(?:tandem|gen_ai)_\w+")
MATCHERS = re.compile(r"(\w+)\{([^}]*)\}")
GROUPED = re.compile(r"\b(?:by|ignoring|without) \(([^)]*)\)")

LABELS = {
    f"{metric.prometheus_name}{end}": {underscored(label) for label in metric.labels} | bound
    for metric in METRICS
    for end, bound in (
        (("_bucket", {"le"}), ("_sum", set()), ("_count", set()))
        if metric.kind is MetricKind.HISTOGRAM
        else (("", set()),)
    )
}


def documented(heading: str) -> list[tuple[str, str]]:
    """Rows of two cells below a heading of the docs: what for, and the query."""
    text = (ROOT / "docs" / "telemetry.md").read_text()
    section = text.partition(f"### {heading}")[2].partition("\n### ")[0]
    return re.findall(r"^\| ([^|]+) \| `([^`]+)` \|$", section, re.MULTILINE)


FIGURES = documented("Derived figures")
FROM_VLLM = documented("Coming from vLLM")
QUERIES = [
    *((str(rule.get("alert") or rule["record"]), str(rule["expr"])) for rule in RULES),
    *((panel["title"], one["expr"]) for panel in DASHBOARD["panels"] for one in panel["targets"]),
    *FIGURES,
]


@pytest.mark.parametrize(("name", "query"), QUERIES, ids=[name for name, _ in QUERIES])
def test_a_query_asks_for_what_there_is(name: str, query: str) -> None:
    series = set(NAME.findall(query))
    assert series <= set(LABELS), series - set(LABELS)
    for asked, matchers in MATCHERS.findall(query):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers))
        assert labels <= LABELS[asked], asked
    known = set().union(*(LABELS[one] for one in series))
    for labels in GROUPED.findall(query):
        assert set(re.findall(r"\w+", labels)) <= known, labels


def test_every_metric_is_looked_at() -> None:
    """By a panel: what nobody looks at need not be kept."""
    shown = {name for panel in DASHBOARD["panels"] for name in NAME.findall(str(panel["targets"]))}
    for metric in METRICS:
        assert any(name.startswith(metric.prometheus_name) for name in shown), metric.name


def test_the_documented_queries_are_found() -> None:
    assert len(FIGURES) == 7
    assert len(FROM_VLLM) == 18


@pytest.mark.parametrize(("theirs", "ours"), FROM_VLLM, ids=[name for name, _ in FROM_VLLM])
def test_what_stands_for_a_metric_of_vllm_exists(theirs: str, ours: str) -> None:
    """By name, or as a histogram whose series have longer ones."""
    for asked in NAME.findall(ours):
        assert asked in LABELS or f"{asked}_bucket" in LABELS, asked
    if "spec_decode" in theirs:
        assert ours == theirs.strip("`").replace("vllm:", "tandem_")


def test_alerts_say_what_is_wrong() -> None:
    alerts = [rule for rule in RULES if "alert" in rule]
    assert {rule["alert"] for rule in alerts} >= {
        "TandemAcceptanceCollapsed",
        "TandemFirstTokenSlow",
        "TandemSequencesLeaked",
        "TandemDraftersLost",
        "TandemSaturated",
    }
    for rule in alerts:
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["for"]


def test_recorded_series_that_are_asked_for_are_recorded() -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    asked = {name for _, query in QUERIES for name in re.findall(r"\btandem:[\w:]+", query)}
    assert asked <= recorded


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= own
