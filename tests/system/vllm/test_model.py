"""vLLM's passes and its memory, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.errors import Unsupported
from tandem.inference.feed import Feed
from tandem.inference.vllm.arguments import VllmOptions
from tests.system.vllm.test_target import LONG, MISSING

pytestmark = [
    pytest.mark.campaign(
        "passes by vLLM, its blocks and what it refuses",
        "unit/inference/vllm; the same contract with torch (unit/inference)",
    ),
    pytest.mark.skipif(find_spec("vllm") is None, reason=MISSING),
]
LENGTH, SEQUENCES = 512, 8
BLOCK = 128


@pytest.fixture(scope="module")
def model(vllm_pair: tuple[Path, Path]) -> Iterator[Any]:
    """A target: vLLM can be started once in a process."""
    from tandem.inference.vllm.model import VllmModel

    options = VllmOptions(
        str(vllm_pair[1]), max_length=LENGTH, max_sequences=SEQUENCES, eager=True, threads=1
    )
    loaded = VllmModel.load(options)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def plain(vllm_pair: tuple[Path, Path]) -> Any:
    return AutoModelForCausalLM.from_pretrained(vllm_pair[1], dtype=torch.float32).eval()


def rows(model: Any, *feeds: Feed) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model.forward(feeds).logits
    return logits


def plain_rows(plain: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = plain(torch.tensor([tokens])).logits[0]
    return logits


def test_rows_come_feed_by_feed_and_rejected_ones_are_forgotten(model: Any, plain: Any) -> None:
    first, second, third = (model.reserve(64) for _ in range(3))
    rows(model, Feed(first, [1, 2, 3], 0), Feed(second, [4, 4], 1))
    # The sequences in another order, one of them new.
    found = rows(
        model,
        Feed(third, [0, 1, 0, 2], 2),
        Feed(second, [0, 3, 3], 3),
        Feed(first, [2, 1], 1),
    )
    expected = torch.cat(
        [
            plain_rows(plain, [0, 1, 0, 2])[-2:],
            plain_rows(plain, [4, 4, 0, 3, 3])[-3:],
            plain_rows(plain, [1, 2, 3, 2, 1])[-1:],
        ]
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    second.rollback(3)
    first.rollback(4)
    # The third one stays where it is.
    found = rows(model, Feed(second, [1], 1), Feed(first, [0, 0], 2))
    expected = torch.cat(
        [plain_rows(plain, [4, 4, 0, 1])[-1:], plain_rows(plain, [1, 2, 3, 2, 0, 0])[-2:]]
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert third.length == 4
    for cache in (first, second, third):
        model.release(cache)


def test_prompts_that_begin_alike_are_computed_once(model: Any, plain: Any) -> None:
    first = model.reserve(400)
    assert first.adopt(LONG, "") == 0
    rows(model, Feed(first, LONG[:200], 0))
    rows(model, Feed(first, LONG[200:], 1))
    first.publish(LONG, len(LONG))
    # The first one's second block is full, its third is not.
    second, changed = model.reserve(400), [*LONG[:200], 3 - LONG[200] % 2, *LONG[201:]]
    assert second.adopt(LONG, "") == 2 * BLOCK
    third = model.reserve(400)
    assert third.adopt(changed, "") == BLOCK
    found = rows(model, Feed(second, LONG[2 * BLOCK :], 1), Feed(third, changed[BLOCK:], 1))
    expected = torch.stack([plain_rows(plain, LONG)[-1], plain_rows(plain, changed)[-1]])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for cache in (first, second, third):
        model.release(cache)
    # What was kept of a text is found by one that goes on from it; what was rejected is not.
    text = [*LONG, *([1, 3] * 50)]
    fourth = model.reserve(500)
    assert fourth.adopt(LONG, "") == 2 * BLOCK
    rows(model, Feed(fourth, LONG[2 * BLOCK :], 1))
    for token in text[len(LONG) :]:
        rows(model, Feed(fourth, [token, 0, 0], 3))
        fourth.rollback(fourth.length - 2)
    fourth.publish(text, len(text))
    model.release(fourth)
    other = model.reserve(500)
    assert other.adopt(text, "of others") == 0
    model.release(other)
    fifth = model.reserve(500)
    assert fifth.adopt(text, "") == 3 * BLOCK
    found = rows(model, Feed(fifth, text[3 * BLOCK :], 1))
    torch.testing.assert_close(found[0], plain_rows(plain, text)[-1], atol=1e-4, rtol=1e-4)
    model.release(fifth)


def test_no_block_is_left_behind(model: Any) -> None:
    free = model.free_positions
    assert free == model.positions == SEQUENCES * LENGTH
    for number in range(500):
        open_ = [model.reserve(LENGTH) for _ in range(SEQUENCES)]
        assert model.reserve(1) is None
        for cache in open_[: number % SEQUENCES]:
            prompt = [number % 5, *LONG[number % 7 :]]
            prompt = prompt[cache.adopt(prompt, "") :] if number % 2 else prompt
            if number % 25 == 0:
                rows(model, Feed(cache, prompt, 1))
        for cache in open_:
            model.release(cache)
    assert model.free_positions == free
    with pytest.raises(Unsupported, match="MAX_NODES=0"):
        model.reserve(10, 4)


def test_what_a_pass_takes_is_known(model: Any) -> None:
    model.measure(LENGTH)
    assert [(sequences, count) for sequences, count, _ in model.pass_times][:3] == [
        (1, 1),
        (1, 5),
        (1, 17),
    ]
