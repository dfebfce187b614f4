"""Ids that a tokenizer has no token for are never drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tandem.inference.feed import Feed
from tandem.inference.model import Model
from target_svc.loading import load_target
from target_svc.settings import TargetSettings
from tests.support.models.tiny import random_llama

VOCAB_SIZE = 12
# Of ids 0 to 9, without 6.
TOKENS = {f"t{token}": token for token in range(10) if token != 6}
WITHOUT = [6, 10, 11]


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of twelve ids, whose tokenizer has nine tokens."""
    folder = tmp_path_factory.mktemp("padded") / "model"
    random_llama(1, VOCAB_SIZE).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(TOKENS, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def loaded(folder: Path, **settings: Any) -> Model:
    return load_target(TargetSettings(model=str(folder), max_sequences=2, **settings))


def rows_of(model: Model) -> torch.Tensor:
    cache = model.reserve(8)
    with torch.inference_mode():
        rows = model.forward([Feed(cache, [1, 6, 3, 11], 4)]).logits.clone()
    model.release(cache)
    return rows


@pytest.mark.parametrize("engine", ["torch", "openvino"])
def test_they_have_no_probability_and_the_others_are_as_they_were(
    padded: Path, engine: str
) -> None:
    masked, kept = (loaded(padded, engine=engine, padded_ids=each) for each in ("mask", "keep"))
    assert list(masked.about.masked_ids) == WITHOUT
    assert list(kept.about.masked_ids) == []
    others = [token for token in range(VOCAB_SIZE) if token not in WITHOUT]
    for _ in range(2):  # a pass leaves nothing after for the next
        own, theirs = rows_of(masked), rows_of(kept)
        assert (own[:, WITHOUT] == -torch.inf).all()
        assert theirs.isfinite().all()
        torch.testing.assert_close(own[:, others], theirs[:, others])


def test_it_is_another_law_of_the_same_weights(padded: Path) -> None:
    masked, kept = (loaded(padded, padded_ids=each).about for each in ("mask", "keep"))
    assert masked.fingerprint != kept.fingerprint
    assert masked.weights_fingerprint == kept.weights_fingerprint
    assert masked.tokenizer_fingerprint == kept.tokenizer_fingerprint
    assert masked.vocab_size == kept.vocab_size == VOCAB_SIZE


def test_an_id_that_ends_texts_is_drawn_all_the_same(padded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ends"
    folder.mkdir()
    for file in padded.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 11}))
    assert list(loaded(folder).about.masked_ids) == [6, 10]


def test_a_whole_vocabulary_keeps_its_fingerprint(embedded_pair: tuple[Path, Path]) -> None:
    masked, kept = (loaded(embedded_pair[1], padded_ids=each).about for each in ("mask", "keep"))
    assert not masked.masked_ids
    assert masked.fingerprint == kept.fingerprint


def test_the_start_says_so(padded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded(padded)
    said = capsys.readouterr().out
    assert "ids without a token are never drawn (TANDEM_TARGET_PADDED_IDS)" in said
    assert "count=3" in said
