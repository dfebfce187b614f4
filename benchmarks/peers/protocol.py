"""The protocol of a worker: requests and answers as lines of JSON on its standard streams.

    load      target, drafter, gammas, dtype,      ok, versions
              device
    generate  prompts, seeds, gamma, temperature,  ok, texts, seconds, timelines
              new_tokens, rule
    quit                                           nothing: it ends, as it does at the end of input

A failure is answered by `error`, a line of text. This file must run in environments that have only
Python's own library.
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
    """The pair to load, and the draft lengths to prepare for.

    Attributes:
        target: folder of a checkpoint, or of its conversion for this engine.
        drafter: the same; empty for drafts by lookup in the prompt.
        gammas: draft lengths that may be asked for; 0 is without drafts.
        dtype: the target's, "float32" or "bfloat16". The engine chooses the drafter's.
        device: of both, as torch names it.
    """

    target: str
    drafter: str
    gammas: tuple[int, ...]
    dtype: str
    device: str = "cpu"


@dataclass(frozen=True)
class Generate:
    """Texts to be written at once.

    Attributes:
        prompts: token ids of each text.
        seeds: of each text; an engine that takes a single seed uses the first.
        gamma: draft length; 0 for none.
        temperature: 0 takes the likeliest token; nothing is truncated.
        new_tokens: of each text, past any end of text.
        rule: one of the engine's ways to draft; empty for its usual one.
    """

    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    gamma: int
    temperature: float
    new_tokens: int
    rule: str = ""


class Engine(Protocol):
    """An engine that a worker wraps.

    An engine that knows when tokens arrived also has `timelines`, of the last texts, as JSON.
    """

    def load(self, load: Load) -> dict[str, str]:
        """Get ready; returns versions by package."""

    def generate(self, generate: Generate) -> Sequence[Sequence[int]]:
        """New token ids of each text; there may be more than requested."""

    def close(self) -> None:
        """Stop everything that would outlive the process."""


def timeline_of(asked_s: float, arrivals: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Of a text that has just ended: when it was asked for, and when how many tokens came."""
    return {
        "intended_s": asked_s,
        "asked_s": asked_s,
        "arrivals": arrivals,
        "ended_s": time.monotonic(),
        "error": "",
        "summary": None,
    }


def line_of(ask: Load | Generate) -> str:
    """A request as a line of JSON."""
    return json.dumps({"do": type(ask).__name__.lower(), **asdict(ask)}) + "\n"


def ask_of(line: str) -> Load | Generate | None:
    """The request in a line; None for `quit`.

    Raises:
        ValueError: the line is no request.
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
    """Answer on the standard streams until told to quit; other output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        answer_all(engine, sys.stdin, answers)
    finally:
        engine.close()


def answer_all(engine: Engine, asks: TextIO, answers: TextIO) -> None:
    """Answer each line of `asks`."""
    # Not `for line in asks`, which may wait for more than one line.
    while line := asks.readline():
        try:
            ask = ask_of(line)
            if ask is None:
                return
            found = _answer(engine, ask)
        except Exception as error:  # a foreign engine may raise anything
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
