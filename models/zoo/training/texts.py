"""The texts, and the frozen models, that the tools of this folder train with."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models import corpus, llama, sampling
from models.loop import Stage, aligned, windows

SAMPLE_BATCHES = 3


def stream(folder: Path, cache: Path) -> corpus.Tokens:
    """The training text by the committed tokenizer, encoded once."""
    path = cache / "train.bin"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        texts = [text for name, text in corpus.sources() if not corpus.held_out(name)]
        tokens = corpus.encode(tokenizer_of(folder), texts)
        temporary = path.with_suffix(".tmp")
        tokens.tofile(temporary)
        os.replace(temporary, path)
    return corpus.load(cache, "train")


def tokenizer_of(folder: Path) -> PreTrainedTokenizerFast:
    """The pair's tokenizer."""
    return corpus.wrap(Tokenizer.from_file(str(folder / "target" / "tokenizer.json")))


def frozen(folder: Path, name: str) -> llama.Weights:
    """The weights of a committed model, in float32, not to be trained."""
    model = LlamaForCausalLM.from_pretrained(str(folder / name), dtype=torch.float32)
    return llama.weights(model.requires_grad_(False))


def mixed(folder: Path, cache: Path, scale: float) -> Callable[[Stage, int], Tensor]:
    """Draws batches [rows, length + 1]: half corpus, half sampled by the target."""
    text = stream(folder, cache)
    batches = max(1, round(SAMPLE_BATCHES * scale))
    target = frozen(folder, "target")
    samples = sampling.ensure(cache / "samples", batches, text, target, llama.TARGET)

    def draw(stage: Stage, step: int) -> Tensor:
        half = replace(stage, rows=stage.rows // 2)
        begin = 0 if step % 2 else samples.shape[1] - 1 - stage.length
        sampled = aligned(samples, half, step)[:, begin : begin + stage.length + 1]
        return torch.cat([windows(text, half, step), sampled])

    return draw
