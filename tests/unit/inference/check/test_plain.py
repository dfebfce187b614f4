"""The model's own noise is measured, and never what only one of two plain ways honours."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.errors import StartupError, Unsupported
from tandem.inference.check.plain import LIMIT, Stage, plain_rows
from tandem.inference.check.texts import TRUNK, ProbeTexts, ordinary_tokens
from tandem.inference.choice import candidates
from tests.support.models.architectures import SUPPORTED, build

GRANITE = next(row for row in SUPPORTED if row.model_type == "granite")


@pytest.mark.parametrize("vocab_size", [2, 3, 5, 97, 49_152])
def test_texts_begin_alike_and_differ_at_each_later_place(vocab_size: int) -> None:
    texts = ProbeTexts.of(vocab_size, 24)
    assert texts.first[:TRUNK] == texts.second[:TRUNK]
    later = zip(texts.first[TRUNK:], texts.second[TRUNK:], strict=True)
    assert all(ours != theirs for ours, theirs in later)
    assert {*texts.first, *texts.second} <= set(range(vocab_size))


def test_ordinary_tokens_are_in_the_lower_middle() -> None:
    tokens = ordinary_tokens(49_152, 1000)
    assert min(tokens) >= 3072
    assert max(tokens) < 24_576
    assert len(set(tokens)) > 900


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_what_only_eager_attention_honours_is_no_noise(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family's own attention may do what no argument says; a batch that does not is refused."""
    model = build(GRANITE).to(dtype)
    own = sys.modules[type(model).__module__]
    right: Any = own.eager_attention_forward

    def halved(module: nn.Module, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        found, weights = right(module, *args, **options)
        return found / 2, weights

    monkeypatch.setattr(own, "eager_attention_forward", halved)
    with pytest.raises(StartupError, match="differs from a plain pass"):
        candidates.by_torch(model)


def rows(seed: int) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(2, 4, 1000)


def test_two_plain_ways_that_tell_different_things_compare_nothing() -> None:
    with pytest.raises(Unsupported, match="leaves nothing to compare"):
        Stage.of("the logits", rows(0), rows(1))


def test_a_row_is_compared_with_its_own_size_and_by_its_largest_element() -> None:
    plain = rows(0)
    plain[:, 0] *= 1000  # as the first token of a text in trained models
    stage = Stage.of("a layer", plain, plain * (1 + 1e-4))
    places = torch.arange(8)
    assert stage.excess(places, plain.flatten(0, 1)).max() == 0
    other = plain.flatten(0, 1) * (1 + 2 * LIMIT * 3e-4)
    assert stage.excess(places, other).min() > 1.5
    column = plain.flatten(0, 1).clone()
    column[5, 7] += 1.0
    assert (stage.excess(places, column) > 1).tolist() == [place == 5 for place in range(8)]


def test_hidden_columns_hide_no_difference() -> None:
    plain = rows(0)
    plain[..., ::2] = torch.finfo(torch.float32).min
    other = rows(1)
    other[..., ::2] = torch.finfo(torch.float32).min
    stage = Stage.of("the logits", plain, plain)
    assert stage.excess(torch.arange(8), other.flatten(0, 1)).min() > 100


@torch.inference_mode()
def test_layers_of_another_form_leave_the_logits_to_be_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(GRANITE)
    texts = ProbeTexts.of(model.config.vocab_size, 12)
    assert len(plain_rows(model, texts, by_layer=True).layers) == 1 + 2
    monkeypatch.setattr("tandem.inference.check.plain.blocks_of", lambda _: ())
    assert plain_rows(model, texts, by_layer=True).layers == ()
