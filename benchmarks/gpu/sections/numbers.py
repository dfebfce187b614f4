"""Draws and verdicts, which come between the passes: ms of the host, then of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.device import work_of
from benchmarks.gpu.run import Run
from benchmarks.gpu.shapes import TRUNCATION, Shapes
from benchmarks.gpu.table import Figure
from benchmarks.gpu.timing import Deadline
from tandem.engine.answers import ScoredRows
from tandem.engine.asks import Decide, Draw, ToHost
from tandem.engine.numbers import decisions, draws, home
from tandem.inference.feed import DrawnToken
from tandem.speculation.draft import Draft
from tandem.speculation.randomness import Purpose, RandomNumbers, VerdictNumbers, digits
from tandem.speculation.request.sampling import Sampling
from tandem.verification import VERIFIERS

SAMPLINGS: dict[str, dict[str, Any]] = {
    "T1": {"temperature": 1.0},
    "T.7": {"temperature": 0.7},
    "T.7 p.9": {"temperature": 0.7, "top_p": 0.9},
    "T.7 k50 p.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
}
_TEXTS, _GAMMAS, _TREES = (1, 16), (4, 8), ((1, 6), (1, 16), (16, 6))
_RULE = VERIFIERS["block"]
_ROW = 64  # tokens of a tree's row
_TURNS = 6
# Bars of issue 64, in ms: of the device, and of the host.
_ON_DEVICE = {"draw 16, T.7 p.9": 0.12, "verdict 16x8, T.7 p.9": 0.25}
_ON_HOST = {"draw 16, T.7 p.9": 0.05}


class Draws:
    """Draws of drafts of four tokens, round after round, as the stepper asks for them."""

    def __init__(self, texts: int, sampling: dict[str, Any], shapes: Shapes) -> None:
        self._samplings = _samplings(texts, sampling)
        self._numbers = [RandomNumbers(s.seed, Purpose.DRAFT, digits) for s in self._samplings]
        self._logits = _logits(texts, shapes)
        self._vocabulary = shapes.vocabulary
        self._turns = count()

    def __call__(self) -> list[list[DrawnToken]]:
        """The next draw of each text."""
        turn, nodes = next(self._turns), 4
        asks = [
            Draw(
                scorer=cast(Any, None),
                feed=cast(Any, None),
                sampling=sampling,
                truncation=TRUNCATION,
                vocab_size=self._vocabulary,
                numbers=numbers,
                round=1 + turn // nodes,
                node=turn % nodes,
                nodes=nodes,
            )
            for sampling, numbers in zip(self._samplings, self._numbers, strict=True)
        ]
        return draws.draw(asks, self._logits, range(len(asks)))


class Verdicts:
    """Verdicts of chains that are on the device (a CPU has them at home), or of trees."""

    def __init__(
        self, texts: int, gamma: int, nodes: int, sampling: dict[str, Any], shapes: Shapes
    ) -> None:
        self._samplings = _samplings(texts, sampling)
        self._numbers = [VerdictNumbers.of(one.seed) for one in self._samplings]
        self._rows = 1 + (nodes or gamma)
        self._drafts: list[Any] = [_tree(nodes, seed, shapes) for seed in range(texts)]
        if not nodes:
            drawing = Draws(texts, sampling, shapes)
            steps = [drawing() for _ in range(gamma)]
            self._drafts = [[step[text][0] for step in steps] for text in range(texts)]
            if not shapes.real:
                self._drafts = home.drafts_of([ToHost(chain) for chain in self._drafts])
        self._logits = _logits(texts * self._rows, shapes)
        self._rounds = count(1)

    def launch(self) -> list[Any]:
        """Decide, and leave the verdicts where they are."""
        round_ = next(self._rounds)
        asks = [
            Decide(
                rule=_RULE,
                draft=draft,
                scored=ScoredRows(self._logits, text * self._rows, self._rows),
                sampling=sampling,
                carry=None,
                numbers=numbers,
                round=round_,
            )
            for text, (draft, sampling, numbers) in enumerate(
                zip(self._drafts, self._samplings, self._numbers, strict=True)
            )
        ]
        return decisions.decide(asks)

    def __call__(self) -> None:
        """Decide, and bring the verdicts home."""
        decisions.decisions_of(self.launch())


@dataclass(frozen=True)
class Setting:
    """One kind of draw or verdict.

    Attributes:
        name: such as "verdict 16x8, T1".
        make: its loop: what is repeated, and what of it only launches.
    """

    name: str
    make: Callable[[Shapes], tuple[Callable[[], object], Callable[[], object]]]


def _settings() -> Iterator[Setting]:
    """Those with bars first."""
    for texts in reversed(_TEXTS):
        for label, sampling in reversed(SAMPLINGS.items()):

            def drawing(shapes: Shapes, texts: int = texts, own: Any = sampling) -> Any:
                loop = Draws(texts, own, shapes)
                return loop, loop

            yield Setting(f"draw {texts}, {label}", drawing)
    for texts in reversed(_TEXTS):
        for gamma in reversed(_GAMMAS):
            for label, sampling in reversed(SAMPLINGS.items()):
                yield Setting(f"verdict {texts}x{gamma}, {label}", _chains(texts, gamma, sampling))
    for texts, nodes in _TREES:
        for label in ("T1", "T.7 p.9"):
            name = f"tree {texts}x{nodes}, {label}"
            yield Setting(name, _chains(texts, 0, SAMPLINGS[label], nodes))


def _chains(texts: int, gamma: int, sampling: dict[str, Any], nodes: int = 0) -> Any:
    def make(shapes: Shapes) -> Any:
        loop = Verdicts(texts, gamma, nodes, sampling, shapes)
        return loop, loop.launch

    return make


@torch.inference_mode()
def measure(run: Run, until: Deadline) -> None:
    """Each kind: whole, and what the host launches of it."""
    found = run.found["numbers"] = {}

    def one(setting: Setting) -> None:
        work, launch = setting.make(run.shapes)
        whole, _ = run.stopwatch.times(work)
        _, host = run.stopwatch.times(launch)
        kind, _, label = setting.name.partition(", ")
        bar = _ON_HOST.get(setting.name) if run.shapes.real else None
        run.add(Figure(f"host, {kind}", label, host, bar=bar))
        found[setting.name] = {"host_ms": host, "whole_ms": whole}

    _each(run, until, one)


@torch.inference_mode()
def measure_device(run: Run, until: Deadline) -> None:
    """Each kind by the profiler."""
    found = run.found["numbers on the device"] = {}

    def one(setting: Setting) -> None:
        work, _ = setting.make(run.shapes)
        work()
        seen = work_of(run.shapes.device, work, _TURNS).a_turn(_TURNS)
        kind, _, label = setting.name.partition(", ")
        bar = _ON_DEVICE.get(setting.name) if run.shapes.real else None
        mark = f"/{seen['kernels']:.0f}k"
        run.add(Figure(f"device, {kind}", label, seen["device_ms"], bar=bar, mark=mark))
        found[setting.name] = seen

    _each(run, until, one)


def _each(run: Run, until: Deadline, one: Callable[[Setting], None]) -> None:
    for setting in _settings():
        if until.over:
            run.left_out.append(f"from {setting.name} on: no time")
            return
        run.attempt(setting.name, lambda setting=setting: one(setting))  # type: ignore[misc]


def _samplings(texts: int, sampling: dict[str, Any]) -> list[Sampling]:
    return [Sampling(seed=11 + text, **sampling) for text in range(texts)]


def _logits(rows: int, shapes: Shapes) -> Tensor:
    """Random logits [rows, V] of a spread as the pair's."""
    numbers = torch.Generator(shapes.device).manual_seed(3)
    size = rows, shapes.vocabulary
    return (5 * torch.randn(size, generator=numbers, device=shapes.device)).to(shapes.dtype)


def _tree(nodes: int, seed: int, shapes: Shapes) -> Draft:
    """A binary tree; siblings drawn without replacement from a row of `_ROW` tokens."""
    numbers = np.random.default_rng(seed)
    ids = numbers.choice(shapes.vocabulary - 1, nodes + _ROW, replace=False)
    tokens, others = ids[:nodes].tolist(), ids[nodes:].tolist()
    parents = [place // 2 for place in range(1, nodes + 1)]
    homes = sorted(set(parents))
    rows = []
    for place in homes:
        own = [token for token, parent in zip(tokens, parents, strict=True) if parent == place]
        rows.append((own, others[: _ROW - len(own)]))
    weights = [w for own, rest in rows for w in [20_000] * len(own) + [200] * len(rest)]
    return Draft(
        token_ids=tokens,
        sizes=[_ROW] * len(rows),
        ids=np.array([token for own, rest in rows for token in own + rest], np.uint32),
        weights=np.array(weights, np.uint16),
        parents=parents,
        row_of=[homes.index(parent) for parent in parents],
        distinct=True,
    )
