"""Which ids end a text: all that the files of a checkpoint name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
)

from tandem.inference.description import end_token_ids

SIZES = {
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
# Llama's class has the id 2, Qwen2's none.
LLAMA_S_OWN = 2


def model_of(kind: type, own: dict[str, Any], generation: Any = None) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(kind(**SIZES, **own))
    if generation is not None:
        model.generation_config = GenerationConfig(**generation)
    return model


@pytest.mark.parametrize(
    ("own", "generation", "tokenizer", "ends"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 7}, 7, [7]),
        ({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, 10, [7, 8, 9, 10]),
        ({"eos_token_id": [7, 8]}, {}, 10, [7, 8, 10]),
        ({}, {"eos_token_id": 7}, None, [7]),
        ({}, {}, 10, [10]),
        ({}, {}, None, []),
        # Beyond the vocabulary no token comes.
        ({"eos_token_id": 100}, {"eos_token_id": 7}, 101, [7]),
    ],
)
def test_all_that_are_named_end_it(
    own: dict[str, Any], generation: dict[str, Any], tokenizer: int | None, ends: list[int]
) -> None:
    model = model_of(Qwen2Config, own, generation)
    assert end_token_ids(model, SimpleNamespace(eos_token_id=tokenizer)) == ends


def test_an_id_that_only_the_librarys_class_has_does_not_end_it() -> None:
    model = model_of(LlamaConfig, {}, {"eos_token_id": 7})
    assert model.config.eos_token_id == LLAMA_S_OWN
    assert end_token_ids(model, SimpleNamespace(eos_token_id=8)) == [7, 8]
    assert end_token_ids(model_of(LlamaConfig, {}, {})) == [LLAMA_S_OWN], "where nothing else does"
    assert end_token_ids(model_of(LlamaConfig, {"eos_token_id": 5}, {})) == [5]
