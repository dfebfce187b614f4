"""Checkpoints that many tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import save_random_llama

# Tiny tensors gain nothing from threads, which only get into each other's way.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A drafter and an unrelated target, one layer each, vocabulary 5, no tokenizer."""
    folder = tmp_path_factory.mktemp("pair")
    return save_random_llama(folder / "drafter", 2), save_random_llama(folder / "target", 1)


@pytest.fixture(scope="session")
def embedded_pair() -> tuple[Path, Path]:
    """The pair that the repository carries."""
    models = Path(__file__).parent.parent / "models"
    return models / "drafter", models / "target"
