"""The start notices each mistake of a batch, in every dtype; and takes a right batch for one."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tandem.errors import StartupError
from tandem.inference.choice.candidates import by_torch
from tests.support.models.architectures import SUPPORTED, build
from tests.support.models.planted import MISTAKES, OF_WINDOWS, Mistake
from tests.support.repository import ROOT

OTHER_DTYPES = pytest.mark.campaign(
    "the start refuses each mistake with trained weights in float32 and float16",
    "trained weights in bfloat16, where noise is largest; random weights in each dtype (this file)",
)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def as_initialised() -> PreTrainedModel:
    """As models are before they are trained: attention is nearly flat, and hides most mistakes. In
    narrower ones bfloat16 hides a quarter more of the scale."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=768,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=12,
            num_key_value_heads=4,
        )
    ).eval()


def sliding() -> PreTrainedModel:
    return build(next(row for row in SUPPORTED if row.model_type == "mistral"))


def of_experts() -> PreTrainedModel:
    return build(next(row for row in SUPPORTED if row.model_type == "qwen3_moe"))


def embedded() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(ROOT / "models/target", dtype=torch.float32).eval()


WEIGHTS = (as_initialised, sliding, of_experts, embedded)


@cache
def weights(make: object) -> PreTrainedModel:
    assert callable(make)
    found: PreTrainedModel = make()
    return found


def cases() -> list[object]:
    """Trained weights take most of the time; bfloat16, where noise is largest, is tried always."""
    return [
        pytest.param(
            make,
            dtype,
            mistake,
            id=f"{make.__name__}-{str(dtype)[6:]}-{mistake.__name__}",
            marks=OTHER_DTYPES if make is embedded and dtype != torch.bfloat16 else (),
        )
        for make in WEIGHTS
        for dtype in DTYPES
        for mistake in (*MISTAKES, *(OF_WINDOWS if make is sliding else ()))
    ]


@pytest.mark.parametrize(("make", "dtype", "mistake"), cases())
@torch.inference_mode()
def test_the_start_refuses(
    make: object, dtype: torch.dtype, mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(weights(make)).to(dtype)
    mistake(monkeypatch)
    with pytest.raises(StartupError, match=r"differs from a plain pass: .* explains .*; in rows "):
        by_torch(model)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", WEIGHTS)
@torch.inference_mode()
def test_the_start_serves(make: object, dtype: torch.dtype) -> None:
    assert by_torch(copy.deepcopy(weights(make)).to(dtype)).takes_trees
