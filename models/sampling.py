"""Text of the target, many sequences at a time: sampled at temperature 1, or greedy."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from models import llama
from models.corpus import Tokens
from models.llama import END_ID, Half, Weights

ROWS = 256
LENGTH = 512
LONGEST_PROMPT = 64
# Where a greedy text counts as looping.
_LOOP, _TIMES = 8, 3


def _step(half: Half, token: Tensor, at: int, cache: Tensor, shape: LlamaConfig) -> Tensor:
    """Logits [rows, vocabulary] after `token` [rows] at position `at`; fills the cache there.

    The cache is [layers, 2, rows, heads, length, size].
    """
    heads = shape.num_attention_heads
    size = shape.hidden_size // heads
    cos, sin = (part[at:] for part in llama.angles(at + 1, size))
    x = F.embedding(token, half.table)
    for layer, (keys, values) in zip(half.layers, cache, strict=True):
        fused = F.linear(llama.norm(x, layer["first"]), layer["qkv"])
        q, k, v = fused.view(-1, 1, 3, heads, size).unbind(2)
        keys[:, :, at] = llama.rotate(k, cos, sin)[:, 0]
        values[:, :, at] = v[:, 0]
        q = llama.rotate(q, cos, sin).transpose(1, 2)
        seen = slice(0, at + 1)
        mixed = F.scaled_dot_product_attention(q, keys[:, :, seen], values[:, :, seen])
        x = llama.feed_forward(x + F.linear(mixed.reshape(x.shape), layer["out"]), layer)
    return F.linear(llama.norm(x, half.norm), half.table)


@torch.inference_mode()
def continue_prompts(
    w: Weights,
    shape: LlamaConfig,
    prompts: Tensor,
    given: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill `prompts` [rows, length] wherever a row's position is not `given`: with samples, or
    without a generator with the likeliest tokens."""
    rows, length = prompts.shape
    half = Half(w, shape)
    size = shape.hidden_size // shape.num_attention_heads
    cache = torch.zeros(
        shape.num_hidden_layers, 2, rows, shape.num_attention_heads, length, size,
        dtype=half.table.dtype,
    )  # fmt: skip
    filled = prompts.clone()
    for at in range(length - 1):
        logits = _step(half, filled[:, at], at, cache, shape)
        drawn = logits.argmax(-1)
        if generator is not None:
            row = logits.float().softmax(-1)
            drawn = torch.multinomial(row, 1, generator=generator)[:, 0]
        filled[:, at + 1] = torch.where(given[:, at + 1], prompts[:, at + 1], drawn)
    return filled


def prompts(stream: Tokens, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Half the rows start a document, half continue 1 to 64 tokens of the stream.

    Returns the rows [rows, length + 1] and which of their positions are given.
    """
    start = generator.integers(len(stream) - LENGTH - 1, size=ROWS)
    text = np.stack([stream[i : i + LENGTH + 1] for i in start]).astype(np.int64)
    known = generator.integers(1, LONGEST_PROMPT + 1, size=ROWS)
    text[::2, 0] = END_ID
    known[::2] = 1
    given = np.arange(LENGTH + 1) < known[:, None]
    return torch.from_numpy(text), torch.from_numpy(given)


def ensure(folder: Path, batches: int, stream: Tokens, w: Weights, shape: LlamaConfig) -> Tokens:
    """The samples [rows, length + 1], drawing those batches that `folder` lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(batches):
        path = folder / f"{number:03}.npy"
        if path.exists():
            continue
        text, given = prompts(stream, np.random.default_rng((1, number)))
        generator = torch.Generator().manual_seed(number)
        drawn = continue_prompts(w, shape, text, given, generator)
        temporary = folder / "unfinished.npy"
        np.save(temporary, drawn.numpy().astype(np.uint16))
        temporary.rename(path)
        print(f"samples {number + 1}/{batches}", flush=True)
    return np.concatenate([np.load(folder / f"{number:03}.npy") for number in range(batches)])


def until_it_loops(text: Sequence[int], first: int = 0) -> int:
    """How many tokens a text has before eight of those from `first` on come the third time."""
    seen: Counter[tuple[int, ...]] = Counter()
    for end in range(first + _LOOP, len(text) + 1):
        last = tuple(text[end - _LOOP : end])
        seen[last] += 1
        if seen[last] == _TIMES:
            return end
    return len(text)
