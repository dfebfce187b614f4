"""Files of texts, what is held out of them, and how they are cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.distillation.drafters import read_tokenizer
from tandem.distillation.plan import Distillation
from tandem.distillation.texts import (
    Record,
    beginnings,
    read_records,
    split,
    stream_of,
    windows,
)
from tandem.errors import StartupError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(plan: Distillation) -> Any:
    return read_tokenizer(plan.target)


def write(path: Path, *lines: object) -> Path:
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    )
    return path


def test_texts_prompts_and_chats(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = TEMPLATE
    try:
        asked = {"role": "user", "content": "two?"}
        path = write(
            tmp_path / "texts",
            {"text": "import os"},
            "",
            {"prompt": "def f"},
            {"messages": [asked]},
            {"messages": [asked, {"role": "assistant", "content": "yes, two"}]},
        )
        text, prompt, question, chat = read_records(path, tokenizer)
    finally:
        tokenizer.chat_template = None
    assert text.prompt == 0
    assert text.token_ids[-1] == tokenizer.eos_token_id
    assert prompt.prompt == len(prompt.token_ids)
    assert tokenizer.decode(question.token_ids) == "<user>two?\n<assistant>"
    assert question.prompt == len(question.token_ids)
    assert tokenizer.decode(chat.token_ids) == "<user>two?\n<assistant>yes, two\n"
    assert tokenizer.decode(chat.token_ids[chat.prompt :]) == "yes, two\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: it is not JSON"),
        ("[1]", "line 2: give an object with one of text, prompt, messages"),
        ({"text": "a", "prompt": "b"}, "line 2: give an object with one of"),
        ({"txt": "a"}, "line 2: give an object with one of"),
        ({"text": " "}, "line 2: text must be a text that is not empty"),
        ({"prompt": 3}, "line 2: prompt must be a text"),
        ({"messages": []}, "line 2: messages must be a list"),
        ({"messages": [{"content": "a"}]}, "line 2: messages must be a list"),
        ({"messages": [{"role": "user", "content": "a"}]}, "line 2: the tokenizer has no chat"),
    ],
)
def test_a_line_that_is_no_text_is_named(
    line: object, says: str, tokenizer: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "texts", {"text": "a"}, line, {"text": "b"})
    with pytest.raises(StartupError, match=says):
        read_records(path, tokenizer)


def test_no_file_bytes_and_too_few_texts_are_said(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot read"):
        read_records(tmp_path / "nothing", tokenizer)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StartupError, match="cannot read"):
        read_records(tmp_path / "bytes", tokenizer)
    with pytest.raises(StartupError, match="has 1 texts"):
        read_records(write(tmp_path / "one", {"text": "a"}), tokenizer)


def records(*sizes: int) -> list[Record]:
    return [Record(np.arange(100 * n, 100 * n + size), 0) for n, size in enumerate(sizes)]


def test_the_same_texts_are_held_out_whatever_their_order() -> None:
    some = records(*range(1, 120))
    kept, out = split(some)
    assert len(out) == 2
    assert len(kept) == 117
    again = split(some[::-1])[1]
    assert {len(each.token_ids) for each in again} == {len(each.token_ids) for each in out}
    assert len(split(some[:2])[1]) == 1


def test_each_window_of_an_epoch_comes_once() -> None:
    stream = np.arange(1000)
    count = 999 // 10 - 1
    found = np.concatenate([windows(stream, 7, 10, step, 0) for step in range(-(-count // 7))])
    first = found[:count, 0]
    assert len(set(first.tolist())) == count
    assert found.shape[1] == 11
    assert bool((np.diff(found, axis=1) == 1).all())
    assert not np.array_equal(windows(stream, 7, 10, 0, 0), windows(stream, 7, 10, 0, 1))


def test_a_short_stream_is_repeated() -> None:
    found = windows(stream_of(records(3, 2)), 2, 8, 0, 0)
    assert found.shape == (2, 9)
    assert set(found.ravel().tolist()) <= {0, 1, 2, 100, 101}


def test_a_prompt_is_a_records_own_or_any_beginning() -> None:
    whole = np.arange(50)
    generator = np.random.default_rng(0)
    tokens, known = beginnings([Record(whole, 40)], 3, 20, generator)
    assert known.tolist() == [10, 10, 10]  # its end: half of a row is left to continue
    assert tokens[:, :10].tolist() == [list(range(30, 40))] * 3
    tokens, known = beginnings([Record(whole, 0)], 50, 20, generator)
    assert known.min() >= 1
    assert known.max() <= 5
    for row, size in zip(tokens, known, strict=True):
        assert bool((np.diff(row[:size]) == 1).all())
        assert not row[size:].any()
