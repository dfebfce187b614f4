"""What a GPU computes; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.models.tiny import VOCAB_SIZE

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device: `make gpu-check` on a machine with an NVIDIA GPU")


def save_for_a_gpu(folder: Path, seed: int) -> None:
    """A Llama of one layer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="session")
def gpu_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two checkpoints with random weights, "drafter" and "target"."""
    folder = tmp_path_factory.mktemp("gpu")
    save_for_a_gpu(folder / "drafter", 2)
    save_for_a_gpu(folder / "target", 1)
    return folder
