"""All ways to decode write the same texts, taking turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.progress import Progress

from benchmarks.contest.baseline import Baseline
from benchmarks.contest.floor import Floor, copy_bandwidth
from benchmarks.contest.method import Method, System
from benchmarks.measure.prompts import PROMPTS
from tandem.tools.load import method as served
from tandem.tools.load.generator import LoadGenerator
from tandem.tools.load.timeline import Timeline

_WARM_UP_TOKENS = 12
# Bare rounds beside each repeat.
_BARE_ROUNDS = 5


@dataclass
class Contest:
    """Who takes part, and the texts so far.

    Attributes:
        methods: ways to decode.
        temperatures: of the texts.
        new_tokens: of each text.
        baselines: transformers by dtype.
        tandem: of running services.
        loop: drives `tandem`.
        floor: measured between the texts.
        bandwidth: bytes a second of the fastest copy between the texts.
        texts: by method and temperature, in the order of the repeats.
    """

    methods: Sequence[Method]
    temperatures: Sequence[float]
    new_tokens: int
    baselines: dict[str, Baseline]
    tandem: LoadGenerator
    loop: asyncio.Runner
    floor: Floor
    bandwidth: float = 0.0
    texts: dict[tuple[Method, float], list[Timeline]] = field(default_factory=dict)

    def run(self, repeats: int, budget_s: float, progress: Progress) -> int:
        """Write texts, repeat by repeat, each with a prompt and a seed of its own.

        Args:
            repeats: at most.
            budget_s: a further repeat starts only if it is likely to end within this time.
            progress: gets a bar.

        Returns:
            Repeats done.
        """
        for method in self.methods:
            self.text(method, 1.0, 0, _WARM_UP_TOKENS)
        total = repeats * len(self.methods) * len(self.temperatures)
        bar = progress.add_task("texts", total=total)
        started = time.perf_counter()
        for repeat in range(repeats):
            spent = time.perf_counter() - started
            if repeat and spent * (repeat + 1) / repeat > budget_s:
                return repeat
            self.floor.measure(_BARE_ROUNDS)
            self.bandwidth = max(self.bandwidth, copy_bandwidth())
            for method, temperature in self._turns(repeat):
                text = self.text(method, temperature, repeat, self.new_tokens)
                self.texts.setdefault((method, temperature), []).append(text)
                progress.advance(bar)
        return repeats

    def _turns(self, repeat: int) -> Iterator[tuple[Method, float]]:
        """Everyone once at each temperature, and somebody else first in each repeat."""
        shift = repeat % len(self.methods)
        for method in (*self.methods[shift:], *self.methods[:shift]):
            for temperature in self.temperatures:
                yield method, temperature

    def text(self, method: Method, temperature: float, repeat: int, tokens: int) -> Timeline:
        """One text, of the prompt and seed that belong to a repeat.

        Raises:
            RuntimeError: a service failed; figures without that text would flatter it.
        """
        prompt = PROMPTS[repeat % len(PROMPTS)]
        if method.system is not System.TANDEM:
            baseline = self.baselines[method.dtype]
            return baseline.text(prompt, temperature, repeat, tokens, method.gamma)
        way = served.Method(method.verifier or "token", method.gamma or 0)
        generation = way.request(prompt, temperature, repeat, tokens)
        text = self.loop.run(self.tandem.text(generation))
        if text.error:
            raise RuntimeError(f"{method} failed: {text.error}")
        return text


@contextmanager
def connected(address: str) -> Iterator[tuple[asyncio.Runner, LoadGenerator]]:
    """A load generator for calls from code that is not asynchronous, and its loop."""
    with asyncio.Runner() as loop:
        generator = loop.run(LoadGenerator(address).__aenter__())
        try:
            yield loop, generator
        finally:
            loop.run(generator.__aexit__(None, None, None))
