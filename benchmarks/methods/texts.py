"""Held-out prompts, and an index without them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from models import corpus
from tandem.retrieval.build import build_index

PROMPT_TOKENS = 64


def held_out(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Prompts, evenly from the held-out files."""
    texts = [text for name, text in corpus.sources() if corpus.held_out(name)]
    ids = tokenizer.encode("".join(texts), add_special_tokens=False).ids
    step = (len(ids) - PROMPT_TOKENS) // count
    return [ids[at : at + PROMPT_TOKENS] for at in range(0, step * count, step)]


def training_index(tokenizer: Tokenizer, folder: Path) -> Path:
    """An index of the files that are not held out."""
    texts = folder / "texts"
    texts.mkdir()
    paths = []
    for number, (name, text) in enumerate(corpus.sources()):
        if not corpus.held_out(name):
            paths.append(texts / f"{number:05d}.py")
            paths[-1].write_text(text)
    build_index(paths, tokenizer, folder / "index", "python", 1 << 30, end_id=0)
    return folder / "index"
