"""The engines that take part, and their running workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console

from benchmarks.peers.installation import (
    CACHE,
    OPENVINO,
    TANDEM_BY_VLLM,
    VLLM,
    Environment,
    checkpoints,
    converted,
    install,
)
from benchmarks.peers.plan import Plan
from benchmarks.peers.protocol import Generate, Load
from benchmarks.peers.way import Measurement, Way
from benchmarks.peers.worker import EngineFailed, Worker
from tandem.inference.kv.size import free_memory
from tandem.tools.load.timeline import Timeline

TANDEM = "Tandem"
_WORKERS = "benchmarks.peers.workers"
_LOAD_SECONDS = 600.0
# A worker of vLLM takes 2.2 GB, and all that ran before has to stay in memory.
LEAST_FREE = 4 << 30
_ASK_SECONDS = 300.0
Say = Callable[[str], None]


@dataclass(frozen=True)
class Engine:
    """How to run an engine.

    Attributes:
        name: for people.
        module: its worker.
        environment: its own environment; None for ours.
        apart: whether each draft length needs its own process.
        batches_drafts: whether it can draft for several texts at once.
        converts: format of the weights of the conversion that it reads; empty for the checkpoints.
        pausable: whether its process may be stopped while others compute.
        rules: ways to draft to compare; the empty string is the engine's usual one.
        own: rules with a fixed draft length, each with that length.
        options: of its worker.
    """

    name: str
    module: str
    environment: Environment | None = None
    apart: bool = False
    batches_drafts: bool = True
    converts: str = ""
    pausable: bool = True
    rules: tuple[str, ...] = ("",)
    own: tuple[tuple[str, int], ...] = ()
    options: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The command that starts its worker."""
        python = self.environment.python if self.environment else sys.executable
        return [python, "-m", self.module, *self.options]

    def ways(self, gammas: Iterable[int]) -> list[Way]:
        """Its ways at these draft lengths; length 0 has no rule."""
        lengths = list(gammas)
        found = [Way(self.name, gamma, rule) for gamma in lengths if gamma for rule in self.rules]
        own = [Way(self.name, gamma, rule) for rule, gamma in self.own]
        return [Way(self.name, 0)] * (0 in lengths) + found + own


SERVICES = Engine(TANDEM, f"{_WORKERS}.tandem_services", pausable=False)
INSIDE = replace(SERVICES, name=f"{TANDEM} inside", options=("--inside",))
BY_VLLM = replace(
    SERVICES, name=f"{TANDEM} by vLLM", environment=TANDEM_BY_VLLM, options=("--vllm",)
)
VLLM_CPU = Engine("vLLM", f"{_WORKERS}.vllm_cpu", VLLM, apart=True)
TRANSFORMERS = Engine("transformers", f"{_WORKERS}.transformers_pair", batches_drafts=False)
# Which the others are compared with.
OURS = (SERVICES.name, INSIDE.name, BY_VLLM.name)
# Its passes compiled, and captured as CUDA graphs.
COMPILED = replace(TRANSFORMERS, name="transformers compiled", rules=(), options=("--compiled",))
GENAI = Engine("OpenVINO GenAI", f"{_WORKERS}.openvino_genai", OPENVINO, converts="fp16")
# The same with the weights of twice the size, for a model whose file has 16 bits.
GENAI_WIDE = replace(GENAI, name="OpenVINO GenAI, 32-bit weights", converts="fp32")
ENGINES = (
    SERVICES,
    INSIDE,
    GENAI,
    # Its law on a CPU is wrong by a defect of its build (vllm#55005): without that, by either way
    # to draft that it has; and as it is shipped.
    replace(VLLM_CPU, name="vLLM mended", options=("--mended",)),
    TRANSFORMERS,
    replace(VLLM_CPU, name="vLLM mended, drawn", options=("--mended", "--drawn")),
    VLLM_CPU,
    BY_VLLM,
)
OF_PUBLISHED = (SERVICES, INSIDE, GENAI, GENAI_WIDE, TRANSFORMERS)
ON_A_GPU = (SERVICES, INSIDE, COMPILED, TRANSFORMERS)


@dataclass
class Roster:
    """The engines that take part, and those that have failed.

    Attributes:
        workers: by way; a worker may serve several ways.
        engines: running engines, by name.
        versions: by engine.
        failures: why an engine, or one of its ways, takes no part.
    """

    workers: dict[Way, Worker] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def load(self, plan: Plan, engines: Sequence[Engine], dtype: str, say: Say) -> str:
        """Set up and load all engines, noting failures; returns the target's folder."""
        folders = checkpoints(plan, say)
        for engine in engines:
            own = folders
            try:
                if engine.environment:
                    install(engine.environment, plan.setup_s, say)
                if engine.converts:
                    own = converted(folders, say, engine.converts)
            except EngineFailed as failure:
                self.failures[engine.name] = str(failure)
                continue
            self.start(engine, own, plan, dtype, say)
        for name, reason in self.failures.items():
            say(f"{name} takes no part: {reason}")
        return folders["target"]

    def start(
        self,
        engine: Engine,
        folders: Mapping[str, str],
        plan: Plan,
        dtype: str,
        say: Say,
    ) -> None:
        """Load an engine for plain decoding and for drafts of each length; a failure is noted."""
        every = (0, *plan.gammas)
        self.engines[engine.name] = engine
        for own in [(gamma,) for gamma in every] if engine.apart else [every]:
            ways = engine.ways(own)
            say(f"loading {ways[0] if engine.apart else engine.name}")
            log = CACHE / "logs" / f"{engine.name.lower().replace(' ', '-')}-{own[0]}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            if free_memory(torch.device("cpu")) < LEAST_FREE:
                self.failures[str(ways[0]) if engine.apart else engine.name] = (
                    "too little memory is free; name fewer --engines"
                )
                return
            try:
                worker = Worker(engine.command, log, settings_of_workers(), pauses=engine.pausable)
            except OSError as error:
                self.failures[engine.name] = str(error)
                return
            self.workers |= dict.fromkeys(ways, worker)
            try:
                load = Load(folders["target"], folders["drafter"], own, dtype, plan.device)
                self.versions[engine.name] = worker.ask(load, _LOAD_SECONDS)["versions"]
            except EngineFailed as failure:
                self._leave(ways[0], str(failure))
                if not own[0]:
                    return

    def generate(self, way: Way, ask: Generate, turn: int = 0) -> Measurement | None:
        """Texts of a way; None once it has failed."""
        if way not in self.workers:
            return None
        try:
            found = self.workers[way].ask(ask, _ASK_SECONDS)
            texts = tuple(tuple(text) for text in found["texts"])
            timelines = tuple(map(Timeline.from_json, found["timelines"]))
            if len(texts) != len(ask.prompts) or min(map(len, texts)) < ask.new_tokens:
                raise EngineFailed("it wrote less than it was asked for")
        except EngineFailed as failure:
            self._leave(way, str(failure))
            return None
        wanted = tuple(text[: ask.new_tokens] for text in texts)
        surplus = sum(map(len, texts)) - sum(map(len, wanted))
        return Measurement(turn, found["seconds"], wanted, surplus, timelines)

    def _leave(self, way: Way, reason: str) -> None:
        """End a failed way's worker, with all ways that it serves."""
        worker = self.workers[way]
        gone = [other for other, its in self.workers.items() if its is worker]
        name = str(way) if self.engines[way.engine].apart else way.engine
        self.failures[name] = reason
        for other in gone:
            del self.workers[other]
        worker.kill()

    def keep(self, ways: Iterable[Way]) -> None:
        """End the workers that none of these ways needs."""
        kept = set(ways)
        needed = {self.workers[way] for way in kept if way in self.workers}
        for worker in set(self.workers.values()) - needed:
            worker.quit()
        self.workers = {way: w for way, w in self.workers.items() if way in kept}

    def ways(self, texts: int) -> list[Way]:
        """All ways that can write this many texts at once."""
        return sorted(
            way
            for way in self.workers
            if texts == 1 or not way.gamma or self.engines[way.engine].batches_drafts
        )

    def close(self) -> None:
        """End all workers."""
        self.keep(())


def settings_of_workers() -> dict[str, str]:
    """Environment of all workers: vLLM's cache of compiled code, and no network access."""
    kept = {"VLLM_CACHE_ROOT": str(CACHE / "vllm" / "compiled"), "HF_HUB_OFFLINE": "1"}
    return {name: os.environ.get(name, value) for name, value in kept.items()}


@contextmanager
def telling() -> Iterator[Say]:
    """Show progress: in one status line on a terminal, else line by line."""
    told = Console(stderr=True)
    with told.status("starting") as status:
        yield status.update if told.is_terminal else told.print


def named(name: str) -> Engine:
    """An engine by the beginning of its name, in any case; of several, the one with the shortest.

    Raises:
        ValueError: there is no such engine.
    """
    for engine in sorted((*ENGINES, GENAI_WIDE, COMPILED), key=lambda engine: len(engine.name)):
        if engine.name.lower().startswith(name.lower()):
            return engine
    raise ValueError(f"no engine {name}: {', '.join(engine.name for engine in ENGINES)}")
