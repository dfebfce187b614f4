"""Probes change no verdict: every architecture, both back ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.models.architectures import KINDS, LLAMA, SUPPORTED, Architecture, build, light
from tests.support.models.parity import TOLERANCE, differences, plain_logits, ragged_logits
from tests.support.models.probes import decoder_of, drafts, probed, rounds_of

OTHERS = pytest.mark.campaign(
    "probes change no verdict, every architecture by OpenVINO",
    "six architectures by OpenVINO; every one by torch (this file)",
)

CASES = [
    pytest.param(
        row,
        engine,
        id=f"{row.model_type}-{engine}",
        marks=() if engine == "torch" or row in KINDS else OTHERS,
    )
    for row in SUPPORTED
    for engine in ("torch", "openvino")
]


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize(("row", "engine"), CASES)
def test_the_verdict_is_the_same_with_forty_probes(row: Architecture, engine: Any) -> None:
    decoder = decoder_of(light(row), engine)
    assert decoder.takes_trees  # a second back end stands by for them
    for kind, draft in drafts().items():
        (plain, rows), (beside, others) = (
            rounds_of(decoder, own) for own in (draft, probed(draft))
        )
        for one, other, own, same in zip(plain, beside, rows, others, strict=True):
            assert (one.emitted, one.place) == (other.emitted, other.place), kind
            assert other.overlaps == pytest.approx(one.overlaps, abs=TOLERANCE)
            assert float((own - same).abs().max()) < TOLERANCE


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_extra_rows_leave_an_output_matrix_alone_that_is_the_embedding(engine: Any) -> None:
    texts = [[5, 17, 3, 80, 41, 9]]
    expected = plain_logits(build(LLAMA, tie_word_embeddings=True), texts)
    decoder = decoder_of(LLAMA, engine, tie_word_embeddings=True)
    assert (decoder.about.probe_tokens, decoder.engine) == (3, engine)
    found = ragged_logits(decoder, texts)
    assert float(differences(expected, found).max()) < TOLERANCE
    kept, _ = rounds_of(decoder, drafts()["tree"])
    beside, _ = rounds_of(decoder, probed(drafts()["tree"]))
    assert [one.emitted for one in kept] == [one.emitted for one in beside]
