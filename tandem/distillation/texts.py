"""The texts that a drafter learns from, read from a file of JSON lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.errors import StartupError

_KEYS = ("text", "prompt", "messages")
# One text of this number is held out.
_HELD_OUT_OF = 50

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Record:
    """A text.

    Attributes:
        token_ids: of all of it.
        prompt: how many of them are its prompt; 0 where any beginning may be one.
    """

    token_ids: TokenIds
    prompt: int


def read_records(path: Path, tokenizer: Any) -> list[Record]:
    """Texts of a file, one JSON object a line: `{"text": ...}`, any text; `{"prompt": ...}`, a text
    that is continued; `{"messages": [{"role": ..., "content": ...}, ...]}`, a chat, written by the
    tokenizer's template. A chat's prompt ends before its last answer.

    Raises:
        StartupError: the file cannot be read, has fewer than two texts, or a line is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read {path}: {error}") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(_record_of(line, tokenizer))
        except ValueError as error:
            raise StartupError(f"{path}, line {number}: {error}") from None
    if len(records) < 2:
        raise StartupError(
            f"{path} has {len(records)} texts, and some are held out: give at least 2, one JSON"
            f" object with {' or '.join(_KEYS)} a line"
        )
    return records


def _record_of(line: str, tokenizer: Any) -> Record:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    named = [key for key in _KEYS if isinstance(value, dict) and key in value]
    if len(named) != 1:
        raise ValueError(f"give an object with one of {', '.join(_KEYS)}")
    key, content = named[0], value[named[0]]
    if key == "messages":
        return _chat(content, tokenizer)
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"{key} must be a text that is not empty")
    ids = tokenizer.encode(content)
    if key == "prompt":
        return Record(np.asarray(ids, np.int64), len(ids))
    end = tokenizer.eos_token_id
    return Record(np.asarray(ids if end is None else [*ids, end], np.int64), 0)


def _chat(messages: object, tokenizer: Any) -> Record:
    if not (
        isinstance(messages, list)
        and messages
        and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages)
    ):
        raise ValueError("messages must be a list of objects with role and content")
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template; give text or prompt instead")
    answered = messages[-1]["role"] == "assistant"
    before = messages[:-1] if answered else messages
    try:
        # Templates raise errors of their own on chats that they do not take.
        prompt = tokenizer.apply_chat_template(before, add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(messages, tokenize=False) if answered else prompt
    except Exception as error:
        raise ValueError(f"the chat template does not take these messages: {error}") from None
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (prompt, whole)]
    same = next(
        (place for place, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), len(ids[0])
    )
    return Record(np.asarray(ids[1], np.int64), min(same, len(ids[1])))


def split(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Those to learn from and those held out, by a hash of each: the same ones in every run."""
    order = sorted(
        range(len(records)),
        key=lambda place: hashlib.sha256(records[place].token_ids.tobytes()).digest(),
    )
    out = set(order[: max(1, len(records) // _HELD_OUT_OF)])
    kept = [record for place, record in enumerate(records) if place not in out]
    return kept, [records[place] for place in sorted(out)]


def stream_of(records: Sequence[Record]) -> TokenIds:
    """All texts after each other."""
    return np.concatenate([record.token_ids for record in records])


def windows(stream: TokenIds, rows: int, length: int, step: int, seed: int) -> TokenIds:
    """Windows [rows, length + 1] of a stream, each once an epoch; a short stream is repeated."""
    if len(stream) < 2 * (length + 1):
        stream = np.tile(stream, -(-2 * (length + 1) // len(stream)))
    count = (len(stream) - 1) // length - 1
    picked = []
    for place in range(step * rows, (step + 1) * rows):
        generator = np.random.default_rng((seed, length, place // count))
        offset = int(generator.integers(length))
        begin = offset + int(generator.permutation(count)[place % count]) * length
        picked.append(stream[begin : begin + length + 1])
    return np.stack(picked)


def pieces(
    records: Sequence[Record], rows: int, length: int, generator: np.random.Generator
) -> tuple[TokenIds, npt.NDArray[np.bool_]]:
    """Parts of texts, at most one a place: where what a model writes could stand, so nothing of a
    record's own prompt counts.

    Returns:
        Texts [n, length + 1] with n at most `rows`, and whose places count [n, length].
    """
    cut = [
        (record, begin)
        for record in records
        for begin in range(0, len(record.token_ids) - 1, length)
        if begin + length >= record.prompt < len(record.token_ids)
    ]
    chosen = [cut[place] for place in generator.permutation(len(cut))[:rows]]
    tokens = np.zeros((len(chosen), length + 1), np.int64)
    counts = np.zeros((len(chosen), length), np.bool_)
    for row, (record, begin) in enumerate(chosen):
        part = record.token_ids[begin : begin + length + 1]
        tokens[row, : len(part)] = part
        counts[row, max(record.prompt - 1 - begin, 0) : len(part) - 1] = True
    return tokens, counts


def beginnings(
    records: Sequence[Record], rows: int, length: int, generator: np.random.Generator
) -> tuple[TokenIds, TokenIds]:
    """Prompts to continue: a record's own, or some tokens of any text. At most half of a row.

    Returns:
        Rows [rows, length + 1], zero after their prompts, and the prompts' lengths [rows].
    """
    tokens = np.zeros((rows, length + 1), np.int64)
    known = np.zeros(rows, np.int64)
    for row, place in enumerate(generator.integers(len(records), size=rows)):
        record = records[place]
        if record.prompt:
            prompt = record.token_ids[: record.prompt][-(length // 2) :]
        else:
            size = int(generator.integers(1, max(2, length // 4)))
            text = record.token_ids[:-1]  # nothing follows its end
            first = int(generator.integers(max(1, len(text) - size + 1)))
            prompt = text[first : first + size] if len(text) else record.token_ids
        tokens[row, : len(prompt)], known[row] = prompt, len(prompt)
    return tokens, known
