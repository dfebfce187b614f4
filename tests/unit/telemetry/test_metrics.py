"""The list of metrics: their names and buckets."""

from __future__ import annotations

import pytest

from tandem.telemetry.metrics import catalog as metrics
from tandem.telemetry.metrics.catalog import METRICS, MetricKind
from tandem.telemetry.metrics.instruments import Instruments


def test_names_are_translated_as_everybody_does() -> None:
    assert metrics.TIME_TO_FIRST_TOKEN.prometheus_name == (
        "gen_ai_server_time_to_first_token_seconds"
    )
    assert metrics.DRAFT_PAYLOAD.prometheus_name == "tandem_draft_payload_bytes_total"
    assert metrics.NUM_ACCEPTED_TOKENS_PER_POS.prometheus_name == (
        "tandem_spec_decode_num_accepted_tokens_per_pos_total"
    )
    assert metrics.KV_POSITIONS.prometheus_name == "tandem_kv_positions"
    names = [metric.prometheus_name for metric in METRICS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("role", ["drafter", "target", "orchestrator"])
def test_instruments_bear_the_names_of_the_list(role: str) -> None:
    instruments = Instruments(role)
    made = {family.name: family.type for family in instruments.registry.collect()}
    listed = {
        metric.prometheus_name.removesuffix("_total"): metric.kind.value
        for metric in METRICS
        if role in metric.roles
    }
    assert made == listed


def test_only_histograms_have_buckets_and_they_rise() -> None:
    for metric in METRICS:
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_buckets_of_the_conventions_are_all_there() -> None:
    """A query for one of their bounds has its answer."""
    token = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5}
    assert token <= set(metrics.TIME_PER_OUTPUT_TOKEN.buckets)
    assert {0.01 * 2**i for i in range(14)} <= set(metrics.REQUEST_DURATION.buckets)
    first = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10}
    assert first == set(metrics.TIME_TO_FIRST_TOKEN.buckets)
