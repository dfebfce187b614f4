"""Chats of several turns: what a cache of prefixes saves, turn by turn.

    python -m benchmarks.chats [--quick] [--engines "Tandem inside" "OpenVINO GenAI" "vLLM mended"]
        [--gammas 0 4] [--chats 4] [--published]

All chats have one system prompt. A turn adds a question, or every other time the longer output of a
tool, as agents do; then the answer is written, and the next turn begins with all of it. Each engine
writes the same chats in turn, with its cache and without, with drafts and without. The first chat
warms up: of the others a cache finds the system prompt.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer

from benchmarks.measure.environment import RESULTS, keep, result_file, target_dtype
from benchmarks.measure.tables import table_of
from benchmarks.peers.installation import CACHE, checkpoints, converted, install
from benchmarks.peers.plan import FULL, QUICK
from benchmarks.peers.protocol import Generate, Load
from benchmarks.peers.roster import (
    ENGINES,
    LEAST_FREE,
    SERVICES,
    Engine,
    Say,
    named,
    settings_of_workers,
    telling,
)
from benchmarks.peers.worker import EngineFailed, Worker
from tandem.inference.kv.size import free_memory
from tandem.tools.load.timeline import Timeline

_LOAD_SECONDS, _TURN_SECONDS = 600.0, 120.0
# Those that can tell when a token comes; each may have its cache on or off.
_TELLING = (SERVICES.name, f"{SERVICES.name} inside", "OpenVINO GenAI", "vLLM mended")


@dataclass(frozen=True)
class Way:
    """How chats are written.

    Attributes:
        engine: by name.
        cache: whether it shares prefixes.
        gamma: draft length; 0 is without drafts.
    """

    engine: str
    cache: bool
    gamma: int


@dataclass(frozen=True)
class Turn:
    """One turn of a chat, or the medians of several.

    Attributes:
        prompt: its tokens.
        first_ms: until the first token.
        whole_ms: until the last one.
        cached: prompt tokens that the target found computed; None where an engine does not say.
        drafter_cached: the same of the drafter.
    """

    prompt: int
    first_ms: float
    whole_ms: float
    cached: int | None
    drafter_cached: int | None


def chat_turns(ids: Sequence[int], chat: int, options: argparse.Namespace) -> list[list[int]]:
    """What each turn of a chat adds, of natural text; the first begins with the system prompt."""
    sizes = [options.tool if turn % 2 else options.question for turn in range(options.turns)]
    begin = options.system + chat * sum(sizes)
    added = []
    for size in sizes:
        added.append([ids[at % len(ids)] for at in range(begin, begin + size)])
        begin += size
    return [[*ids[: options.system], *added[0]], *added[1:]]


def write_chat(
    worker: Worker, way: Way, added: Sequence[Sequence[int]], mark: int, answer: int
) -> Iterator[Turn]:
    """A chat's turns, one after the other.

    Args:
        worker: of the way's engine.
        way: that writes.
        added: by each turn.
        mark: the first token, so that no way finds what another one computed.
        answer: tokens of each answer.

    Raises:
        EngineFailed: the engine did.
    """
    tokens = [mark]
    for new in added:
        tokens += new
        ask = Generate((tuple(tokens),), (0,), way.gamma, 0.0, answer)
        reply = worker.ask(ask, _TURN_SECONDS)
        seen = Timeline.from_json(reply["timelines"][0])
        told = seen.summary
        yield Turn(
            len(tokens),
            seen.time_to_first_token_s * 1e3,
            seen.latency_s * 1e3,
            told.cached_tokens if told else None,
            told.drafter_cached_tokens if told and way.gamma else None,
        )
        tokens += reply["texts"][0][:answer]


def medians(turns: Sequence[Turn]) -> Turn:
    """Of the same turn of several chats."""

    def middle(name: str) -> Any:
        values = [getattr(turn, name) for turn in turns]
        return None if None in values else median(values)

    return Turn(*map(middle, Turn.__dataclass_fields__))


def started(
    engine: Engine,
    cache: bool,
    gammas: Sequence[int],
    options: argparse.Namespace,
    folders: dict[str, str],
) -> tuple[Worker, dict[str, str]]:
    """An engine's worker, ready for these draft lengths; and its versions.

    Raises:
        EngineFailed: it cannot start.
    """
    longest = options.system + options.turns * (options.question + options.tool + options.answer)
    settings = {f"TANDEM_{role}_MAX_LENGTH": str(longest + 64) for role in ("TARGET", "DRAFTER")}
    own = ["--streamed", *["--prefix-cache"] * cache]
    if engine.apart:  # vLLM, whose worker has an option instead
        own += ["--max-length", str(longest + 64)]
    command = replace(engine, options=(*engine.options, *own)).command
    name = "-".join([*engine.name.lower().split(), _word(cache), *map(str, gammas)])
    log = CACHE / "logs" / f"chats-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if free_memory(torch.device("cpu")) < LEAST_FREE:
        raise EngineFailed("too little memory is free; name fewer --engines")
    worker = Worker(command, log, settings | settings_of_workers(), pauses=engine.pausable)
    load = Load(folders["target"], folders["drafter"], tuple(gammas), options.dtype)
    try:
        versions: dict[str, str] = worker.ask(load, _LOAD_SECONDS)["versions"]
    except EngineFailed:
        worker.quit()
        raise
    return worker, versions


class Chats:
    """Runs all ways.

    Attributes:
        found: turns of each chat, by way.
        versions: by engine.
        failures: why an engine takes no part, or left.

    Args:
        options: of the command line.
        say: is called with what comes next.
    """

    def __init__(self, options: argparse.Namespace, say: Say) -> None:
        self.found: dict[Way, list[list[Turn]]] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.failures: dict[str, str] = {}
        self._options = options
        self._say = say
        self._workers: dict[Way, Worker] = {}

    def run(self) -> None:
        """Start the engines, write all chats, and stop the engines."""
        plan = QUICK if self._options.quick else FULL
        if self._options.published:
            plan = replace(plan, published="chats")
        folders = checkpoints(plan, self._say)
        try:
            for engine in self._options.engines:
                self._start(engine, folders, plan.setup_s)
            text = Path(inspect.getfile(argparse)).read_text()
            tokenizer = Tokenizer.from_file(f"{folders['target']}/tokenizer.json")
            self._write(tokenizer.encode(text).ids)
        finally:
            for worker in set(self._workers.values()):
                worker.quit()

    def _start(self, engine: Engine, folders: dict[str, str], seconds: float) -> None:
        try:
            if engine.environment:
                install(engine.environment, seconds, self._say)
            own = converted(folders, self._say) if engine.converts else folders
            every = sorted(self._options.gammas)
            if engine.apart and not own["drafter"]:
                every = [gamma for gamma in every if not gamma]  # it has a draft model, or nothing
            for cache, gammas in product((True, False), zip(every) if engine.apart else (every,)):
                self._say(f"loading {engine.name}, cache {_word(cache)}")
                worker, told = started(engine, cache, gammas, self._options, own)
                self._workers |= {Way(engine.name, cache, gamma): worker for gamma in gammas}
                self.versions[engine.name] = told
        except EngineFailed as failure:
            self.failures[engine.name] = str(failure)

    def _write(self, ids: Sequence[int]) -> None:
        ways = list(self._workers)
        self.found = {way: [] for way in ways}
        for chat in range(self._options.chats + 1):
            added = chat_turns(ids, chat, self._options)
            shift = chat % max(len(ways), 1)
            for way in (*ways[shift:], *ways[:shift]):
                if way.engine in self.failures:
                    continue
                self._say(f"chat {chat}: {way.engine}, cache {_word(way.cache)}, γ {way.gamma}")
                worker, mark = self._workers[way], 1 + ways.index(way)
                try:
                    turns = list(write_chat(worker, way, added, mark, self._options.answer))
                except EngineFailed as failure:
                    self.failures[way.engine] = str(failure)
                    continue
                if chat:
                    self.found[way].append(turns)

    def rows(self) -> list[dict[str, Any]]:
        """Medians over the chats, of each turn of each way."""
        return [
            _named(way) | {"turn": number} | asdict(medians([turns[number - 1] for turns in chats]))
            for way, chats in self.found.items()
            for number in range(1, self._options.turns + 1)
            if chats
        ]


def _named(way: Way) -> dict[str, Any]:
    return asdict(way) | {"cache": _word(way.cache)}


def _word(cache: bool) -> str:
    return "on" if cache else "off"


def whole_chats(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each way the time of a chat; and the time to the first token of its later turns, over that
    without the cache."""
    found = []
    for first in (row for row in rows if row["turn"] == 1):
        own = {name: first[name] for name in ("engine", "cache", "gamma")}
        same = [row for row in rows if own.items() <= row.items()]
        cold = [row for row in rows if (own | {"cache": "off"}).items() <= row.items()]
        later = [(a["first_ms"], b["first_ms"]) for a, b in zip(same, cold, strict=False)][1:]
        ratio = median(a / b for a, b in later) if later else None
        found.append(
            own
            | {"chat_s": sum(row["whole_ms"] for row in same) / 1e3, "first_token_over_cold": ratio}
        )
    return found


def main() -> None:
    """Measure, print, and write benchmarks/results/chats.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    telling_engines = [engine for engine in ENGINES if engine.name in _TELLING]
    parser.add_argument("--quick", action="store_true", help="a smaller target")
    parser.add_argument(
        "--published", action="store_true", help="SmolLM2-135M-Instruct; drafts are by lookup"
    )
    parser.add_argument("--engines", type=named, nargs="+", default=telling_engines)
    parser.add_argument("--gammas", type=int, nargs="+", default=[0, 4], help="draft lengths")
    parser.add_argument("--chats", type=int, default=2, help="after the one that warms up")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--system", type=int, default=512, help="tokens of the system prompt")
    parser.add_argument("--question", type=int, default=64, help="tokens of a question")
    parser.add_argument("--tool", type=int, default=512, help="tokens of a tool's output")
    parser.add_argument("--answer", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=target_dtype())
    parser.add_argument("--note", default="", help="kept in the file: what else ran, say")
    parser.add_argument("--out", type=result_file, default=RESULTS / "chats.json")
    options = parser.parse_args()
    if mute := [engine.name for engine in options.engines if engine.name not in _TELLING]:
        parser.error(f"{', '.join(mute)} cannot tell when a token comes: {', '.join(_TELLING)} can")
    with telling() as say:
        chats = Chats(options, say)
        chats.run()
    rows, console = chats.rows(), Console(width=140)
    whole = whole_chats(rows)
    console.print(table_of(rows, "turns (medians)"), table_of(whole, "chats"))
    for name, reason in chats.failures.items():
        console.print(f"{name} took no part, or left: {reason}", markup=False)
    told = vars(options) | {"engines": [engine.name for engine in options.engines], "out": ""}
    keep(
        options.out,
        versions=chats.versions,
        options=told,
        failures=chats.failures,
        turns=rows,
        chats=whole,
    )


if __name__ == "__main__":
    main()
