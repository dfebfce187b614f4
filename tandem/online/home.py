"""Texts of what a drafter is for, which it must not forget while it learns from its traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.distillation.drafters import quiet, read_tokenizer
from tandem.distillation.teachers import continue_rows
from tandem.distillation.texts import read_records, stream_of, windows
from tandem.whole_files import writing

# Texts that are read, and texts that a drafter writes where it is given none.
_READ, _WRITTEN = 128, 48
_SEED = 5


def home_texts(file: str, folder: str, first: Any, length: int, kept: Path) -> Tensor:
    """[n, length + 1] of int64.

    Args:
        file: of texts, one JSON object a line, see `read_records`; empty has the drafter write its
            own, which are texts like those that it was trained on.
        folder: of the checkpoint, with its tokenizer.
        first: its model.
        length: of a text, in tokens.
        kept: file for what the drafter wrote.

    Raises:
        StartupError: the texts cannot be read.
    """
    if file:
        with quiet():
            records = read_records(Path(file), read_tokenizer(folder))
        return torch.from_numpy(windows(stream_of(records), _READ, length, 0, _SEED))
    try:
        return load_file(kept)["tokens"]
    except (OSError, SafetensorError, KeyError):
        written = written_texts(first, _WRITTEN, length)
    with writing(kept) as fresh:
        save_file({"tokens": written}, fresh)
    return written


def written_texts(model: Any, count: int, length: int) -> Tensor:
    """[count, length + 1] int64, texts that a model writes at temperature 1."""
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.zeros(count, length + 1, dtype=torch.int64)
    begins = config.bos_token_id if isinstance(config.bos_token_id, int) else None
    if begins is None:
        begins = config.eos_token_id if isinstance(config.eos_token_id, int) else 0
    tokens[:, 0] = begins
    known = torch.ones(count, dtype=torch.int64)
    return continue_rows(model, tokens, known, config.vocab_size, generator)
