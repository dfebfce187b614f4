"""Processed distributions equal Hugging Face's, and a draw never lands on weight 0."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tandem.speculation import distribution
from tandem.speculation.categorical import likeliest
from tandem.speculation.distribution import draw, process
from tandem.speculation.request.sampling import Sampling


def hugging_face(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return torch.softmax(warpers(None, logits), -1)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.3),
        Sampling(top_k=7),
        Sampling(top_k=10_000),
        Sampling(top_p=0.5),
        Sampling(top_p=0.999),
        Sampling(min_p=0.1),
        Sampling(temperature=1.7, top_k=50, top_p=0.9, min_p=0.05),
    ],
)
@pytest.mark.parametrize("vocab_size", [11, 2000])
def test_equals_hugging_face(sampling: Sampling, vocab_size: int) -> None:
    logits = 3 * torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(1))
    probs = process(logits, [sampling])
    assert torch.allclose(probs, hugging_face(logits.clone(), sampling), atol=1e-6)
    assert probs.dtype == torch.float32


def test_a_row_does_not_depend_on_its_batch() -> None:
    """Each row with parameters of its own equals the row alone, bit for bit."""
    samplings = [
        Sampling(),
        Sampling(temperature=0),
        Sampling(temperature=0.3),
        Sampling(top_k=1),
        Sampling(top_k=50),
        Sampling(top_p=0.4),
        Sampling(min_p=0.2),
        Sampling(temperature=1.7, top_k=50, top_p=0.9, min_p=0.05),
    ]
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(len(samplings), 1000, generator=generator)
    batch = process(logits, samplings)
    for row, sampling in enumerate(samplings):
        assert torch.equal(batch[row], process(logits[row : row + 1], [sampling])[0]), sampling


MIXTURE = [
    Sampling(),
    Sampling(top_p=0.6),
    Sampling(temperature=0.5, top_k=3, top_p=0.9),
    Sampling(top_k=255, top_p=0.95),
    Sampling(top_k=300, top_p=0.95),
    Sampling(top_k=40),
    Sampling(temperature=0.0),
    Sampling(temperature=8.0, top_p=0.95),
    Sampling(top_p=0.5, min_p=0.2),
]


@pytest.mark.parametrize("steps", [2.0, 1e6])
def test_a_first_look_finds_what_all_tokens_in_order_do(
    steps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where many logits are equal, and where top-k's last ones go on after the look."""
    logits = (4 * torch.randn(len(MIXTURE), 2000) * steps).round() / steps
    logits[:, 7] = -torch.inf
    logits[3, 100:900] = logits[3].max() - 1
    found = process(logits, MIXTURE)
    monkeypatch.setattr(distribution, "_NUCLEUS_FIRST_LOOK", 2000)
    assert torch.allclose(found, process(logits, MIXTURE), atol=1e-6)
    assert ((found > 0) == (process(logits, MIXTURE) > 0)).all()


@pytest.mark.parametrize("size", [40, 3000])
def test_minus_zero_is_zero(size: int) -> None:
    values = torch.zeros(1, size)
    values[0, ::2] = -0.0
    assert likeliest(values, 5)[1].tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("count", [1, 5, 30])
def test_the_likeliest_of_long_rows_are_those_of_all_in_order(count: int) -> None:
    values = torch.randn(6, 3000)
    values[1] = (2 * values[1]).round()
    values[2] = values[2].softmax(-1).masked_fill(values[2] < 2.5, 0)  # fewer than are wanted
    values[3] = 0.0
    values[4] = -torch.inf
    values[4, 2990:] = torch.arange(10.0)
    expected = values.sort(descending=True, stable=True)
    found, ids = likeliest(values, count)
    assert ids.equal(expected.indices[:, :count])
    assert found.equal(expected.values[:, :count])


def test_a_number_that_is_none_does_not_end_the_search() -> None:
    values = torch.randn(1, 3000)
    values[0, 5] = torch.nan
    assert len(set(likeliest(values, 3)[1][0].tolist())) == 3


def test_temperature_0_is_the_one_hot_argmax() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [5.0, 5.0, 1.0]])
    probs = process(logits, [Sampling(temperature=0)])
    assert probs.tolist() == [[0, 1, 0], [1, 0, 0]]


def test_half_precision_is_widened_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    assert torch.equal(process(logits, [Sampling()]), torch.softmax(logits.float(), -1))


def test_extreme_temperatures_stay_finite() -> None:
    logits = torch.tensor([[-1e4, 0.0, 1e4]])
    for temperature in (1e-300, 1e-30, 1e30, 1e300):
        probs = process(logits, [Sampling(temperature=temperature)])
        assert probs.sum() == pytest.approx(1)


def test_draw_is_the_inverse_cdf() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0]]).expand(4, -1)
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.9999], dtype=torch.float64)
    assert draw(weights, uniforms).tolist() == [1, 1, 3, 3]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, 1.0])
def test_draw_never_lands_on_weight_0(uniform: float) -> None:
    generator = torch.Generator().manual_seed(5)
    weights = torch.rand(200, 50, generator=generator)
    weights = weights.masked_fill(torch.rand(200, 50, generator=generator) < 0.5, 0.0)
    weights[:, 20] = 1e-30
    tokens = draw(weights, torch.full((200,), uniform, dtype=torch.float64))
    assert (weights.gather(1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -0.5),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_bad_parameters_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        Sampling(**{field: value})  # type: ignore[arg-type]
