"""A published model as a user serves it: start, memory, first token, speed, beside transformers.

    python -m benchmarks.published             every dtype and engine that this machine takes
    python -m benchmarks.published --quick     one turn of short texts

Each way of serving has a cache of its own and is started twice; the first start finds it empty.
Then its texts and those of transformers take turns. Writes benchmarks/results/published.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import grpc
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks.measure.environment import RESULTS, ROOT, keep
from benchmarks.measure.tables import table_of
from benchmarks.measure.texts import asked
from benchmarks.measure.vitals import vitals_of
from models import published
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.tools.local.pair import Pair
from tandem.tools.local.stack import Stack, StackSettings

DTYPES, ENGINES = ("float32", "bfloat16", "float16"), ("torch", "openvino")
_PROMPTS = (10, 500, 2000)
_MAX_LENGTH = 4096
_QUESTIONS = (
    "Write a short story about a fisherman who finds a letter in a bottle.",
    "Explain to a child why the sky is blue.",
    "List the steps to repair a flat tyre of a bicycle.",
    "Summarise the history of the printing press.",
)


@dataclass
class Way:
    """One way to serve, and what was measured.

    Attributes:
        dtype: of the weights.
        engine: what was asked for.
        start_s: first start, then second: until a text would be accepted. Of transformers, reading
            the checkpoint alone.
        memory_gib: resident memory of the target after all texts; None where it is not apart.
        first_token_s: of each prompt length, every turn.
        plain: tokens/s without drafts, every text.
        lookup: tokens/s with drafts by lookup, every text.
    """

    dtype: str
    engine: str
    start_s: list[float] = field(default_factory=list)
    memory_gib: float | None = None
    first_token_s: dict[int, list[float]] = field(default_factory=dict)
    plain: list[float] = field(default_factory=list)
    lookup: list[float] = field(default_factory=list)

    def row(self) -> dict[str, object]:
        """Of the table."""
        first = {
            f"first token at {count}": f"{min(times):.3f} to {max(times):.3f} s"
            for count, times in self.first_token_s.items()
        }
        return {
            "engine": self.engine,
            "dtype": self.dtype,
            "start, then again": ", ".join(f"{spent:.1f} s" for spent in self.start_s),
            "GiB": self.memory_gib,
            **first,
            "plain": median(self.plain),
            "lookup": median(self.lookup) if self.lookup else None,
        }


class Transformers:
    """The same texts by `generate`."""

    def __init__(self, dtype: str) -> None:
        started = time.perf_counter()
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            published.FOLDER, dtype=getattr(torch, dtype)
        ).eval()
        self.way = Way(dtype, "transformers", [time.perf_counter() - started])

    @torch.inference_mode()
    def turn(self, prompts: dict[int, list[int]], chat: list[int], tokens: int) -> None:
        """One text of each kind."""
        for count, prompt in prompts.items():
            self.way.first_token_s.setdefault(count, []).append(self._seconds(prompt, 1))
        # The prompt's time is no part of the speed.
        spent = self._seconds(chat, tokens) - self._seconds(chat, 1)
        self.way.plain.append((tokens - 1) / spent)

    def _seconds(self, prompt: list[int], tokens: int) -> float:
        started = time.perf_counter()
        self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return time.perf_counter() - started


class Tandem:
    """The services, with drafts by lookup from the target's own process.

    Args:
        dtype: of the target.
        engine: of the target.

    Raises:
        Failure: they cannot start.
    """

    def __init__(self, dtype: str, engine: str) -> None:
        self.way = Way(dtype, engine)
        self._cache = tempfile.TemporaryDirectory()
        pair = Pair(target=str(published.FOLDER), dtype=dtype, max_length=_MAX_LENGTH, inside=True)
        services: dict[str, dict[str, str]] = {"orchestrator": {}, **pair.settings()}
        services["target"]["ENGINE"] = engine
        self._settings = StackSettings(services, start=self._start_process, inside=True)
        self.start().kill()
        self._stack = self.start()

    def _start_process(
        self, command: list[str], *, env: dict[str, str], **options: Any
    ) -> subprocess.Popen[bytes]:
        """With a cache of its own."""
        environment = {**env, "XDG_CACHE_HOME": self._cache.name}
        process: subprocess.Popen[bytes] = subprocess.Popen(command, env=environment, **options)
        return process

    def start(self) -> Stack:
        """Start them, and time it."""
        stack, started = Stack(self._settings), time.perf_counter()
        try:
            stack.start()
        except BaseException:
            stack.kill()
            raise
        self.way.start_s.append(time.perf_counter() - started)
        stack.settle()
        return stack

    def turn(self, prompts: dict[int, list[int]], chat: list[int], tokens: int) -> None:
        """One text of each kind."""
        for count, prompt in prompts.items():
            first, *_ = self._text(prompt, 1, 0)
            self.way.first_token_s.setdefault(count, []).append(first)
        for speeds, gamma in ((self.way.plain, 0), (self.way.lookup, None)):
            first, last, begun = self._text(chat, tokens, gamma)
            speeds.append((tokens - begun) / (last - first))

    def _text(self, prompt: list[int], tokens: int, gamma: int | None) -> tuple[float, float, int]:
        """Seconds until the first tokens, and until the last; how many came first."""
        options = {} if gamma is None else {"gamma": gamma}
        message = asked(0, tokens, 0.0, prompt, **options)
        with grpc.insecure_channel(self._stack.processes["orchestrator"].address) as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            grpc.channel_ready_future(channel).result()
            started = time.perf_counter()
            came = [
                (time.perf_counter() - started, len(reply.round.tokens))
                for reply in stub.Generate(pb.GenerateRequest(generation=message))
                if reply.WhichOneof("event") == "round"
            ]
        return came[0][0], came[-1][0], came[0][1]

    def close(self) -> None:
        """End them; their memory is read before."""
        self.way.memory_gib = vitals_of(self._stack.processes["target"].id).resident_bytes / 2**30
        self._stack.kill()
        self._cache.cleanup()


def chats() -> list[list[int]]:
    """Token ids of questions, as the model's template has them."""
    tokenizer = AutoTokenizer.from_pretrained(published.FOLDER)
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True
            )["input_ids"]
        )
        for question in _QUESTIONS
    ]


def measured(dtype: str, engines: list[str], turns: int, tokens: int) -> Iterator[Way]:
    """Each engine beside transformers, in turn."""
    tokenizer = AutoTokenizer.from_pretrained(published.FOLDER)
    words = tokenizer((ROOT / "LICENSE").read_text()).input_ids
    prompts = {count: words[:count] for count in _PROMPTS}
    asked_for = chats()
    sides: list[Any] = [Transformers(dtype)]
    try:
        for engine in engines:
            sides.append(Tandem(dtype, engine))
        for turn in range(turns):
            for side in sides:
                side.turn(prompts, asked_for[turn % len(asked_for)], tokens)
    finally:
        for side in sides[1:]:
            side.close()
    yield from (side.way for side in sides)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one turn of short texts")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    chosen = parser.parse_args()
    try:
        published.prepare()
    except OSError as error:
        sys.exit(str(error))
    disable_progress_bar()
    set_verbosity_error()
    turns, tokens = (1, 16) if chosen.quick else (4, 64)
    ways: list[Way] = []
    for dtype in chosen.dtypes:
        # OpenVINO's pass takes no float16.
        ways += measured(dtype, list(ENGINES[: 1 if dtype == "float16" else 2]), turns, tokens)
        Console(width=180).print(table_of(way.row() for way in ways))
    if not chosen.quick:
        keep(RESULTS / "published.json", ways=[asdict(way) for way in ways])


if __name__ == "__main__":
    main()
