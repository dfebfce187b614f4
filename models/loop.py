"""A training loop whose steps are functions of their numbers, so that a resume is exact."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from models.corpus import Tokens

WARM_UP = 60
MUON_RATE = 0.02
ADAM_RATE = 3e-3
CHECKPOINT_SECONDS = 150.0


@dataclass(frozen=True)
class Stage:
    """Part of a run: batches [rows, length]; the rate goes linearly from `start` to `end`."""

    name: str
    steps: int
    rows: int
    length: int
    start: float
    end: float


Draw = Callable[[Stage, int], Tensor]
Loss = Callable[[Stage, Tensor], Tensor]


@lru_cache(maxsize=4)
def _order(count: int, length: int, epoch: int) -> tuple[int, npt.NDArray[np.int64]]:
    """An epoch's offset into the stream, and the order of its `count` windows."""
    generator = np.random.default_rng((length, epoch))
    return int(generator.integers(length)), generator.permutation(count)


def windows(stream: Tokens, stage: Stage, step: int) -> Tensor:
    """Batch `step` of a stage [rows, length + 1]: windows of a flat stream, each once an epoch."""
    count = (len(stream) - 1) // stage.length - 1
    picked = []
    for place in range(step * stage.rows, (step + 1) * stage.rows):
        offset, order = _order(count, stage.length, place // count)
        begin = offset + int(order[place % count]) * stage.length
        picked.append(stream[begin : begin + stage.length + 1])
    return torch.from_numpy(np.stack(picked).astype(np.int64))


def aligned(samples: Tokens, stage: Stage, step: int) -> Tensor:
    """Batch `step` of a stage [rows, length + 1]: whole rows of `samples`, each once an epoch."""
    count = len(samples)
    places = range(step * stage.rows, (step + 1) * stage.rows)
    picked = [samples[_order(count, 1, place // count)[1][place % count]] for place in places]
    return torch.from_numpy(np.stack(picked).astype(np.int64))


def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        hidden = parameter.ndim == 2 and "embed" not in name
        (matrices if hidden else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _locate(stages: list[Stage], step: int) -> tuple[Stage, int]:
    """The stage of a step, and the step's number within it."""
    for stage in stages:
        if step < stage.steps:
            return stage, step
        step -= stage.steps
    raise IndexError("step past the last stage")


class Report:
    """Progress lines: mean loss, tokens a second and the time left, every 20 steps."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.losses: list[float] = []
        self.since = time.monotonic()

    def line(self, stage: Stage, step: int, loss: float) -> None:
        """Count one step, and print when a line is due."""
        self.losses.append(loss)
        if len(self.losses) < 20 and step < self.total:
            return
        now = time.monotonic()
        each = (now - self.since) / len(self.losses)
        mean = sum(self.losses) / len(self.losses)
        print(
            f"{stage.name} {step}/{self.total} loss {mean:.4f} "
            f"{stage.rows * stage.length / each:.0f} tokens/s "
            f"ETA {(self.total - step) * each / 60:.1f} min",
            flush=True,
        )
        self.losses, self.since = [], now


@dataclass
class Run:
    """What a checkpoint holds: parameters, optimiser state, the step and the seconds so far."""

    model: nn.Module
    optimisers: list[torch.optim.Optimizer]
    path: Path
    step: int = 0
    seconds: float = 0.0

    def load(self) -> None:
        """Continue from the checkpoint if there is one."""
        if not self.path.exists():
            return
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.seconds = state["step"], state["seconds"]

    def save(self) -> None:
        """Replace the checkpoint in one move."""
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": self.step,
            "seconds": self.seconds,
        }
        temporary = self.path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self.path)


def train(
    model: nn.Module,
    stages: list[Stage],
    draw: Draw,
    loss: Loss,
    checkpoint: Path,
    optimisers: list[torch.optim.Optimizer] | None = None,
) -> float:
    """Run `stages`, resuming from `checkpoint` if it is there; returns the seconds spent."""
    run = Run(model, optimisers or optimizers(model), checkpoint)
    bases = [[group["lr"] for group in optimiser.param_groups] for optimiser in run.optimisers]
    run.load()
    total = sum(stage.steps for stage in stages)
    report = Report(total)
    before = saved_at = time.monotonic()
    while run.step < total:
        stage, within = _locate(stages, run.step)
        rate = stage.start + (stage.end - stage.start) * within / stage.steps
        rate *= min(1.0, (run.step + 1) / WARM_UP)
        value = loss(stage, draw(stage, within))
        value.backward()  # type: ignore[no-untyped-call]
        for optimiser, base in zip(run.optimisers, bases, strict=True):
            for group, full in zip(optimiser.param_groups, base, strict=True):
                group["lr"] = full * rate
            optimiser.step()
            optimiser.zero_grad()
        run.step += 1
        report.line(stage, run.step, value.item())
        now = time.monotonic()
        run.seconds, before = run.seconds + now - before, now
        if now - saved_at > CHECKPOINT_SECONDS or run.step == total:
            run.save()
            saved_at = now
    return run.seconds
