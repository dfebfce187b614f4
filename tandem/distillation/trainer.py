"""Steps of an optimiser that go on where they were cut, to the same weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import EngineFailure, StartupError
from tandem.whole_files import writing

_WARM_UP_STEPS = 20
_MOST_NORM = 1.0
_SAVE_SECONDS = 60.0

Clock = Callable[[], float]


def optimisers(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers (its steps scaled to AdamW's, so that both have one rate),
    AdamW for embeddings, norms and heads."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) or each is head]
    apart = {id(weight) for table in tables for weight in table.parameters()}
    for weight in model.parameters():
        of_a_layer = weight.ndim == 2 and id(weight) not in apart
        (matrices if of_a_layer else others).append(weight)
    made: list[torch.optim.Optimizer] = []
    if others:
        made.append(torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0))
    if matrices:
        made.append(
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
        )
    return made


@dataclass
class Training:
    """A run: its weights, its optimisers' state and where it is.

    Attributes:
        model: that is trained, float32.
        optimisers: of its parameters.
        path: of the checkpoint.
        step: that comes next.
        seconds: of training so far.
        about: what else goes with the checkpoint.

    Args:
        rate: the largest learning rate.
        share: of the run that is done, 0 to 1, by step and seconds; the rate falls with it.
        clock: in seconds.
    """

    model: nn.Module
    optimisers: Sequence[torch.optim.Optimizer]
    path: Path
    rate: float
    share: Callable[[int, float], float]
    clock: Clock = time.monotonic
    step: int = 0
    seconds: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)
    _saved_at: float = -math.inf

    def load(self) -> None:
        """Go on from the checkpoint, if there is one.

        Raises:
            StartupError: it cannot be read.
        """
        self._saved_at = self.seconds
        if not self.path.exists():
            return
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            self.model.load_state_dict(state["model"])
            for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(saved)
        except Exception as error:  # torch raises many kinds
            raise StartupError(
                f"the checkpoint {self.path} cannot be read ({error}); remove it to begin again"
            ) from None
        self.step, self.seconds, self.about = state["step"], state["seconds"], state["about"]
        self._saved_at = self.seconds

    @property
    def done(self) -> float:
        """The share of the run that is done."""
        return min(self.share(self.step, self.seconds), 1.0)

    def take(self, losses: Callable[[], Iterable[Tensor]]) -> float:
        """One step; its loss.

        Args:
            losses: parts of the step's mean loss, each with its graph; consumed one by one.

        Raises:
            EngineFailure: the loss or its gradient is not finite. The weights are as before.
        """
        began = self.clock()
        total = 0.0
        for part in losses():
            part.backward()  # type: ignore[no-untyped-call]
            total += part.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), _MOST_NORM)
        if not (math.isfinite(total) and bool(norm.isfinite())):
            self._forget_gradients()
            raise EngineFailure(
                f"the loss of step {self.step} is not finite ({total:g}): the last checkpoint and"
                " the best drafter are kept. The same command goes on there with a smaller rate"
            )
        rate = self.rate * min(1.0, (self.step + 1) / _WARM_UP_STEPS) * (1 - self.done)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.step()
        self._forget_gradients()
        self.step += 1
        self.seconds += self.clock() - began
        return total

    def _forget_gradients(self) -> None:
        for optimiser in self.optimisers:
            optimiser.zero_grad()

    def save_if_due(self) -> None:
        """Save what a minute of training made."""
        if self.seconds - self._saved_at >= _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Replace the checkpoint in one move.

        Raises:
            OSError: there is no room; the checkpoint before stays.
        """
        state = {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": self.step,
            "seconds": self.seconds,
            "about": self.about,
        }
        with writing(self.path) as fresh:
            torch.save(state, fresh)
        self._saved_at = self.seconds
