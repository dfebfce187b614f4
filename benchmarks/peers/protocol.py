"""What a worker is asked and what it answers: JSON, a line each, on its standard streams.

    load      target, drafter, gammas, dtype       ok, versions
    generate  prompts, seeds, gamma, temperature,  ok, texts, seconds, timelines
              new_tokens, rule
    quit                                           nothing: it ends, as it does at the end of input

Whatever fails is answered by `error`, a line of text. This file is read by environments that have
no more than Python's own library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO


@dataclass(frozen=True)
class Load:
    """Which pair, and how it will be asked.

    Attributes:
        target: what the engine reads: a checkpoint's folder, or its own conversion of it.
        drafter: the same.
        gammas: draft lengths that may be asked for; 0 is without drafts.
        dtype: the target's, "float32" or "bfloat16". A drafter's is the engine's to choose.
    """

    target: str
    drafter: str
    gammas: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Generate:
    """Texts to be written at once.

    Attributes:
        prompts: token ids of each.
        seeds: of each; an engine that has but one seed takes the first.
        gamma: draft length; 0 for none.
        temperature: 0 takes the likeliest token; nothing is truncated.
        new_tokens: of each, past any end of text.
        rule: one of the engine's ways to draft; empty for its usual one.
    """

    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    gamma: int
    temperature: float
    new_tokens: int
    rule: str = ""


class Engine(Protocol):
    """What a worker wraps.

    One that knows when tokens came has `timelines` too: of the last texts, as JSON.
    """

    def load(self, load: Load) -> dict[str, str]:
        """Get ready; returns versions by package."""

    def generate(self, generate: Generate) -> Sequence[Sequence[int]]:
        """New token ids of each text, however many came."""

    def close(self) -> None:
        """Free what would outlive the process."""


def line_of(ask: Load | Generate) -> str:
    """An ask as it goes over the wire."""
    return json.dumps({"do": type(ask).__name__.lower(), **asdict(ask)}) + "\n"


def ask_of(line: str) -> Load | Generate | None:
    """The ask of a line; None is the wish to end.

    Raises:
        ValueError: it is none.
    """
    fields = json.loads(line)
    kind = fields.pop("do", None)
    if kind == "quit":
        return None
    if kind == "load":
        return Load(**{**fields, "gammas": tuple(fields["gammas"])})
    if kind == "generate":
        prompts = tuple(tuple(prompt) for prompt in fields["prompts"])
        return Generate(**{**fields, "prompts": prompts, "seeds": tuple(fields["seeds"])})
    raise ValueError(f"nobody knows how to do {kind!r}")


def serve(engine: Engine) -> None:
    """Answer on the standard streams until told to quit; what else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        answer_all(engine, sys.stdin, answers)
    finally:
        engine.close()


def answer_all(engine: Engine, asks: TextIO, answers: TextIO) -> None:
    """Answer each line of `asks`."""
    # Not `for line in asks`, which may wait for more than a line.
    while line := asks.readline():
        try:
            ask = ask_of(line)
            if ask is None:
                return
            found = _answer(engine, ask)
        except Exception as error:  # a foreign engine raises what it likes
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(found), file=answers, flush=True)


def _answer(engine: Engine, ask: Load | Generate) -> dict[str, Any]:
    if isinstance(ask, Load):
        return {"ok": True, "versions": engine.load(ask)}
    started = time.perf_counter()
    texts = engine.generate(ask)
    seconds = time.perf_counter() - started
    answer = {"ok": True, "texts": [[int(i) for i in text] for text in texts], "seconds": seconds}
    return answer | {"timelines": getattr(engine, "timelines", [])}
