"""What is measured: the shapes of the pair, and how many texts, rows and positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from tandem.engine.asks import Truncation

# Captured passes have at most as many rows, as the services have by default (GRAPH_ROWS).
GRAPH_ROWS = 512
# Of a drafter's distributions, the services' own by default (DRAFT_MASS, DRAFT_SUPPORT).
TRUNCATION = Truncation(0.999, 512)


@dataclass(frozen=True)
class Shapes:
    """Sizes of a run.

    Attributes:
        device: of both models.
        dtype: of both models.
        target: its configuration.
        drafter: its configuration, of the same vocabulary.
        code: width of what a token is; see `pair`.
        positions: of each model's KV pool.
        longest: text that the graphs are captured for, in tokens.
        contexts: tokens before the rows of a pass; those beyond `longest` have a section of their
            own.
        texts: at once.
        rows: of each text in a pass.
        trees: nodes of a text's tree in a pass.
        chunk: prompt tokens in a pass beside decoding texts.
        prompts: lengths of whole prompts.
        new_tokens: of a text through the services.
        seconds: that a setting of rounds is measured for.
        turn: seconds that a pass is repeated for.
        copied: bytes of the tensors that the device's bandwidth is measured with.
        product: rows and columns of the square product.
    """

    device: torch.device
    dtype: torch.dtype
    target: PreTrainedConfig
    drafter: PreTrainedConfig
    code: int
    positions: int
    longest: int
    contexts: tuple[int, ...]
    texts: tuple[int, ...]
    rows: tuple[int, ...]
    trees: tuple[int, ...]
    chunk: int
    prompts: tuple[int, ...]
    new_tokens: int
    seconds: float
    turn: float
    copied: int
    product: int

    @property
    def vocabulary(self) -> int:
        """Token ids of both models."""
        return int(self.target.vocab_size)

    @property
    def capacity(self) -> int:
        """Tokens of a text in rounds, so that none reaches `longest`: captured passes end with the
        first text that is longer than theirs."""
        return self.longest - 256

    @property
    def real(self) -> bool:
        """Whether a GPU is measured."""
        return self.device.type == "cuda"


def _common(vocabulary: int, positions: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }


def real() -> Shapes:
    """Llama 3.1 8B, and Qwen2.5 0.5B with that vocabulary, in bfloat16."""
    common = _common(128_256, 40_960)
    return Shapes(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        target=LlamaConfig(
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            **common,
        ),
        drafter=Qwen2Config(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            **common,
        ),
        code=64,
        positions=150_000,
        longest=2304,
        contexts=(128, 8192, 32_768),
        texts=(1, 4, 16, 64),
        rows=(1, 5, 9, 17, 33),
        trees=(6, 16, 64),
        chunk=512,
        prompts=(2048, 8192),
        new_tokens=192,
        seconds=1.0,
        turn=0.25,
        copied=4 << 30,
        product=8192,
    )


def fake() -> Shapes:
    """Tiny models on a CPU: they show that the program runs, and nothing of its figures."""
    common = _common(500, 2048)
    return Shapes(
        device=torch.device("cpu"),
        dtype=torch.float32,
        target=LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            **common,
        ),
        drafter=Qwen2Config(
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=3,
            num_key_value_heads=1,
            **common,
        ),
        code=16,
        positions=20_000,
        longest=600,
        contexts=(32, 128, 512),
        texts=(1, 16),
        rows=(1, 5, 17),
        trees=(6, 16),
        chunk=40,
        prompts=(64, 700),
        new_tokens=16,
        seconds=0.0,
        turn=0.0,
        copied=1 << 16,
        product=64,
    )
