"""Rounds with drafts inside, through the engine: no messages, no services."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks.gpu import pair
from benchmarks.gpu.device import profiled
from benchmarks.gpu.host import Host, compiler
from benchmarks.gpu.pair import LeftOut
from benchmarks.gpu.run import Run
from benchmarks.gpu.sections.numbers import SAMPLINGS
from benchmarks.gpu.shapes import TRUNCATION
from benchmarks.gpu.table import Figure
from benchmarks.gpu.timing import Deadline
from tandem.drafting.decoders.model import ModelDrafter
from tandem.drafting.decoders.shape import ACCEPTANCE
from tandem.drafting.decoders.tree import TreeDrafter
from tandem.drafting.drafter import Drafter
from tandem.engine.admission import Admission, AdmissionLimits, RoomWanted
from tandem.engine.engine import Engine
from tandem.engine.schedule import BatchLimits
from tandem.engine.stepper import Stepper
from tandem.profile import Profile
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2
from tandem.verification import VERIFIERS
from target_svc import round as rounds
from target_svc import run as runs
from target_svc.drafts import OwnDrafts
from target_svc.own_drafting import OwnDrafting
from target_svc.round import TargetRequest, TargetSequence
from target_svc.run import Credit, RunRound

_MOST_TEXTS = 64
_PROMPT = 128
# Rounds before the measured ones, twice: the first may compile, the second estimates a round.
_WARM_UPS, _ESTIMATE = 4, 4
_MOST_ROUNDS, _PROFILED_ROUNDS = 200, 8
# What an engine of a service has by default: rows of a step, and how long it waits for others.
_BUDGET, _GATHER = 512, 1.0
# Bars of issue 64, in ms a round; and of trees in multiples of a chain's round (issue 63).
_BARS = {"1, T1, 4": 11.5, "16, T1, 4": 13.5}
_BAR_OF_TREES = 1.25

SAMPLED: dict[str, dict[str, Any]] = {"T0": {"temperature": 0.0}, **SAMPLINGS}


@dataclass(frozen=True)
class Setting:
    """Texts at once, their sampling, and the size of their drafts."""

    texts: int
    sampling: str
    gamma: int
    nodes: int = 0

    def __str__(self) -> str:
        size = f"tree {self.gamma}/{self.nodes}" if self.nodes else str(self.gamma)
        return f"{self.texts}, {self.sampling}, {size if self.gamma else 'plain'}"


_TREE, _LARGE_TREE = (4, 12), (6, 24)
# The most important ones first: the time may not do for all.
SETTINGS = (
    Setting(1, "T1", 0),
    Setting(1, "T1", 4),
    Setting(16, "T1", 0),
    Setting(16, "T1", 4),
    Setting(1, "T1", *_TREE),
    Setting(16, "T1", *_TREE),
    Setting(1, "T0", 4),
    Setting(16, "T0", 4),
    Setting(1, "T.7 p.9", 4),
    Setting(16, "T.7 p.9", 4),
    *(Setting(texts, "T1", gamma) for gamma in (8, 2) for texts in (1, 16)),
    Setting(64, "T1", 0),
    Setting(64, "T1", 4),
    Setting(4, "T1", 0),
    Setting(4, "T1", 4),
    *(Setting(texts, "T1", *_LARGE_TREE) for texts in (1, 16)),
    Setting(4, "T1", *_TREE),
    *(Setting(texts, kind, 0) for kind in ("T0", "T.7 p.9") for texts in (1, 16)),
    *(Setting(texts, "T1", 16) for texts in (1, 16)),
    *(Setting(texts, "T0", gamma) for gamma in (8, 2, 16) for texts in (1, 16)),
    *(Setting(texts, "T.7 p.9", gamma) for gamma in (8, 2, 16) for texts in (1, 16)),
    *(Setting(texts, "T1", gamma) for gamma in (8, 2, 16) for texts in (4, 64)),
    *(Setting(texts, "T0", gamma) for texts in (4, 64) for gamma in (0, 4, 8)),
    *(Setting(texts, "T.7 p.9", gamma) for texts in (4, 64) for gamma in (0, 4, 8)),
    Setting(64, "T1", *_TREE),
)
_PROFILED = tuple(Setting(texts, "T1", *size) for size in ((4,), (0,), _TREE) for texts in (1, 16))


@dataclass
class Texts:
    """Open texts of one setting, over an engine.

    Attributes:
        engine: runs their rounds.
        tokens: emitted since the last `reset`.
        taken: rounds of each, in all.
    """

    run: Run
    setting: Setting
    engine: Engine
    own: OwnDrafts
    sequences: list[TargetSequence] = field(default_factory=list)
    tokens: int = 0
    taken: int = 0

    async def open(self) -> None:
        """Take the prompts in."""
        sampling = SAMPLED[self.setting.sampling]
        shapes, target = self.run.shapes, self.run.model("target")
        prompts = min(_PROMPT, shapes.capacity // 4)

        async def one(number: int) -> TargetSequence:
            ids = pair.tokens(prompts, shapes, number + 1)
            request = TargetRequest(
                Sampling(seed=100 + number, **sampling),
                VERIFIERS["block"],
                nodes=self.setting.nodes,
                end=1 << 20,
            )
            sequence = TargetSequence(list(ids), request, own=OwnDrafting(list(ids)))
            opening = rounds.open_(target.decoder, sequence, 0)
            await self.engine.open(
                sequence, opening, RoomWanted(shapes.capacity - self.setting.nodes)
            )
            return sequence

        self.sequences = await asyncio.gather(*(one(n) for n in range(self.setting.texts)))

    async def rounds(self, count: int) -> float:
        """So many rounds of each text at once; their seconds."""
        target = self.run.model("target").decoder

        def told(done: RunRound, times: object) -> None:
            self.tokens += len(done.decision.emitted)

        async def one(sequence: TargetSequence) -> None:
            credit = Credit(self.taken)
            credit.grant(count, DraftSize(self.setting.gamma, self.setting.nodes))
            steps = runs.run(target, sequence, credit, self.own)
            await self.engine.run(sequence, steps, on_report=told)

        began = time.perf_counter()
        await asyncio.gather(*(one(sequence) for sequence in self.sequences))
        self.taken += count
        return time.perf_counter() - began

    @property
    def rounds_left(self) -> int:
        """Rounds until a text may have reached its capacity."""
        longest = max(sequence.length for sequence in self.sequences)
        each = self.setting.gamma + 1
        return (self.run.shapes.capacity - longest - self.setting.nodes) // each - 1

    async def close(self) -> None:
        """Release all, and end the engine's thread."""
        for sequence in self.sequences:
            self.engine.release(sequence)
        await asyncio.to_thread(self.engine.stop)


async def _opened(run: Run, setting: Setting) -> Texts:
    target, drafter = run.model("target").decoder, run.model("drafter").decoder
    method: Drafter = ModelDrafter(drafter, TRUNCATION)
    if setting.nodes:
        method = TreeDrafter(drafter, TRUNCATION, ACCEPTANCE, setting.nodes)
    own = OwnDrafts(
        method,
        target_pb2.TargetDrafts(),
        run.shapes.vocabulary,
        on_device=run.shapes.real,
    )
    engine = Engine(
        "target-engine",
        Admission((target, drafter), AdmissionLimits(_MOST_TEXTS, _MOST_TEXTS, 5.0)),
        BatchLimits(_BUDGET, gather=_GATHER, profile=Profile(target.pass_times)),
        Stepper(run.shapes.device),
    )
    engine.start()
    texts = Texts(run, setting, engine, own)
    try:
        await texts.open()
    except BaseException:
        await texts.close()
        raise
    return texts


async def _measured(run: Run, setting: Setting, host: Host) -> dict[str, Any]:
    """Rounds for a second or so, with what the host and the compiler did meanwhile."""
    texts = await _opened(run, setting)
    try:
        await texts.rounds(_WARM_UPS)
        each = await texts.rounds(_ESTIMATE) / _ESTIMATE
        count = min(max(round(run.shapes.seconds / each), 6), _MOST_ROUNDS, texts.rounds_left)
        if count < 1:
            raise LeftOut(f"texts of {run.shapes.capacity} tokens end before the rounds do")
        host.reset()
        texts.tokens, cpu = 0, time.process_time()
        with compiler() as compiled:
            wall = await texts.rounds(count)
        cpu = time.process_time() - cpu
        parts = host.a_round(count)
        return {
            "rounds": count,
            "ms_a_round": 1e3 * wall / count,
            "tokens_per_s": texts.tokens / wall,
            "tokens_a_round": texts.tokens / count / setting.texts,
            "cpu_ms_a_round": 1e3 * cpu / count,
            "host": parts,
            "outside_step_ms": 1e3 * wall / count - parts.get("step", 0.0),
            "passes": host.of_passes(),
            "compiler": dict(compiled),
        }
    finally:
        await texts.close()


async def _profiled(run: Run, setting: Setting) -> dict[str, Any]:
    """What the device does in some rounds."""
    texts = await _opened(run, setting)
    try:
        await texts.rounds(_WARM_UPS)
        count = min(_PROFILED_ROUNDS, texts.rounds_left)
        with profiled(run.shapes.device) as work:
            wall = await texts.rounds(count)
        return work.a_turn(count, 16) | {"profiled_ms_a_round": 1e3 * wall / count}
    finally:
        await texts.close()


def measure(run: Run, until: Deadline) -> None:
    """Setting by setting, and trees beside chains."""
    host = Host()
    models = [run.model("target"), run.model("drafter")]
    with host.watching(models):

        def one(setting: Setting) -> None:
            found = uvloop.run(_measured(run, setting, host))
            run.found.setdefault("rounds", {})[str(setting)] = found
            _show(run, setting, found)

        _each(run, until, SETTINGS, one)
    tree, chain = run.value(_line(1, "T1"), "tree 4/12"), run.value(_line(1, "T1"), "4")
    if tree and chain:
        bar = _BAR_OF_TREES if run.shapes.real else None
        run.add(Figure("rounds, trees / chains of 4", "1 text", tree, "ms", chain, bar))


def _line(texts: int, sampling: str) -> str:
    return f"rounds, {texts}, {sampling}"


def _show(run: Run, setting: Setting, found: dict[str, Any]) -> None:
    name = str(setting).split(", ")[-1]
    line = _line(setting.texts, setting.sampling)
    bar = _BARS.get(str(setting)) if run.shapes.real else None
    speed = f" {found['tokens_per_s']:,.0f}t/s"
    run.add(Figure(line, name, found["ms_a_round"], bar=bar, mark=speed))
    host, compiled = found["host"], found["compiler"]
    parts = ("step", "target", "drafter", "draw", "decide", "wait and copy", "attention launched")
    told = ", ".join(f"{part} {host[part]:.2f}" for part in parts if part in host)
    run.say(
        f"    {found['tokens_a_round']:.2f} tokens a round; host ms: {told}, outside"
        f" {found['outside_step_ms']:.2f}; compiler: {compiled}"
    )
    for kind, own in found["passes"].items():
        if "launched" in kind and run.shapes.real:
            run.say(
                f"    {kind}: {own['passes']}, median {own['median_ms']} ms, longest"
                f" {own['longest_ms']}, first {own['first_ms']}, last {own['last_ms']}"
            )
            run.add(Figure(f"in rounds {setting}", f"{kind}, host", own["median_ms"]))
    if setting.nodes:
        # Issue 62: none after the warm-up.
        bar = 0.0 if run.shapes.real else None
        where = f"in rounds {setting}, compiler"
        for name in ("compilations", "misses", "guards"):
            value = float(compiled[name])
            run.add(Figure(where, name, value, "", bar=None if name == "guards" else bar))


def measure_device(run: Run, until: Deadline) -> None:
    """The device's share of a round, by the profiler."""

    def one(setting: Setting) -> None:
        found = uvloop.run(_profiled(run, setting))
        run.found.setdefault("rounds on the device", {})[str(setting)] = found
        whole = run.found.get("rounds", {}).get(str(setting), {}).get("ms_a_round")
        mark = f"/{found['kernels']:.0f}k"
        line = f"device in rounds, {setting.sampling}"
        name = f"{setting.texts}, {str(setting).split(', ')[-1]}"
        run.add(Figure(line, name, found["device_ms"], "ms", whole, mark=mark))

    _each(run, until, _PROFILED, one)


def _each(
    run: Run, until: Deadline, settings: Iterable[Setting], one: Callable[[Setting], None]
) -> None:
    for setting in settings:
        if setting.texts not in run.shapes.texts:
            continue
        if until.over:
            run.left_out.append(f"rounds from {setting} on: no time")
            return
        run.attempt(f"rounds {setting}", lambda setting=setting: one(setting))  # type: ignore[misc]
