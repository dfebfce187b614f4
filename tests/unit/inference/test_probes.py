"""Probes change no verdict: every architecture, both back ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.models.architectures import KINDS, SUPPORTED, Architecture
from tests.support.models.parity import TOLERANCE
from tests.support.models.probes import decoder_of, drafts, probed, rounds_of

CASES = [
    pytest.param(
        row,
        engine,
        id=f"{row.model_type}-{engine}",
        marks=() if engine == "torch" or row in KINDS else pytest.mark.campaign,
    )
    for row in SUPPORTED
    for engine in ("torch", "openvino")
]


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(("row", "engine"), CASES)
def test_the_verdict_is_the_same_with_forty_probes(row: Architecture, engine: Any) -> None:
    decoder = decoder_of(row, engine)
    assert decoder.takes_trees  # a second back end stands by for them
    for kind, draft in drafts().items():
        (plain, rows), (beside, others) = (
            rounds_of(decoder, own) for own in (draft, probed(draft))
        )
        for one, other, own, same in zip(plain, beside, rows, others, strict=True):
            assert (one.emitted, one.place) == (other.emitted, other.place), kind
            assert other.overlaps == pytest.approx(one.overlaps, abs=TOLERANCE)
            assert float((own - same).abs().max()) < TOLERANCE
