"""A tiny pair with the embedded pair's tokenizer, and a plan to distil it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tandem.distillation.plan import Distillation
from tests.support.models.tiny import random_llama
from tests.support.repository import ROOT

VOCABULARY = 2048
_TEXTS = [f"def f{number}(x):\n    return x + {number} * {number % 7}\n" for number in range(40)]


def save_spelling(folder: Path, seed: int) -> Path:
    """A random Llama of the embedded pair's vocabulary, with its tokenizer."""
    random_llama(seed, VOCABULARY).save_pretrained(str(folder))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "target" / name, folder / name)
    return folder


def small_plan(folder: Path) -> Distillation:
    """Six small steps, measured after every second one; its files are in a folder."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in _TEXTS))
    return Distillation(
        target=str(save_spelling(folder / "target", 1)),
        drafter=str(save_spelling(folder / "drafter", 2)),
        prompts=str(prompts),
        steps=6,
        rows=4,
        length=12,
        measure_every=2,
    )
