"""A pair of tiny models that vLLM takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.models.tiny import VOCAB_SIZE, save_random_llama


def save_for_vllm(folder: Path, seed: int, vocab_size: int = VOCAB_SIZE) -> Path:
    """A one-layer Llama whose heads are as wide as vLLM's smallest, and whose four heads two ranks
    can share."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a drafter and a target with random weights and one vocabulary."""
    folder = tmp_path_factory.mktemp("vllm")
    return save_random_llama(folder / "drafter", 2), save_for_vllm(folder / "target", 1)
