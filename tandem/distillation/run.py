"""A distillation from its plan to a drafter's folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.client.blocking import Client
from tandem.distillation.distilled import Distilled, card_of
from tandem.distillation.divergences import loss
from tandem.distillation.drafters import (
    fresh_drafter,
    quiet,
    read_drafter,
    read_model,
    read_tokenizer,
    require_same,
    write_drafter,
)
from tandem.distillation.held_out import Figures, HeldOut, rows_at_once
from tandem.distillation.plan import Distillation, inputs_of, keep_plan
from tandem.distillation.teachers import LocalTeacher, Say, ServedTeacher, Teacher
from tandem.distillation.texts import read_records, split
from tandem.distillation.trainer import Clock, Training, optimisers
from tandem.distillation.training_texts import Batch, TrainingTexts
from tandem.errors import EngineFailure, StartupError
from tandem.whole_files import alone, writing

# The divergence that asks no target.
_TOKENS = "cross-entropy"


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """Where a run is.

    Attributes:
        step: that is done.
        share: of the run that is done, 0 to 1.
        seconds: of training so far.
        loss: of the step.
        overlap: the newest, by kind of text; see `HeldOut`.
    """

    step: int
    share: float
    seconds: float
    loss: float
    overlap: Mapping[str, float]


def distill(
    plan: Distillation,
    output: Path,
    *,
    device: str = "",
    threads: int = 0,
    client: Client | None = None,
    say: Say = lambda sentence: None,
    progress: Callable[[TrainingProgress], None] = lambda progress: None,
    clock: Clock = time.monotonic,
) -> Distilled:
    """Train a drafter; a run that was cut goes on.

    The folder holds the best drafter so far at any moment, and in `run` what the run goes on from.

    Args:
        plan: of the run.
        output: folder of the drafter.
        device: that computes both models; empty for CUDA where there is one, else the CPU.
        threads: of the CPU; 0 takes PyTorch's default, one a core.
        client: of a target that is served; None makes one of its address.
        say: called with what a person should know.
        progress: called after each step.
        clock: of the training, in seconds.

    Raises:
        StartupError: the pair, the texts or the folder do not do, or belong to another run.
        EngineFailure: the loss was not finite. The best drafter is kept.
        Unavailable: a target that is served was away for too long.
        OSError: there is no room on the disk. What was written before is kept.
    """
    plan.check()
    if threads:
        torch.set_num_threads(threads)
    run = output / "run"
    others = [path for path in output.glob("*") if path != run]
    if others and not (run / "plan.json").exists():
        raise StartupError(f"{output} has files that are of no run: give a folder of its own")
    inputs = inputs_of(plan)
    if plan.is_served and client is None:
        client = Client(*plan.target.split(","), note=say)
    parts = _Parts(plan, _device_of(device), client, say)
    with alone(run):
        keep_plan(plan, inputs, run / "plan.json")
        try:
            return _Run(plan, output, parts, say, progress, clock).go()
        except torch.OutOfMemoryError as error:
            why = str(error).splitlines()[0]
            raise EngineFailure(
                f"out of memory: give fewer rows, or a smaller length ({why})"
            ) from None


class _Parts:
    """The pair and its texts."""

    def __init__(
        self, plan: Distillation, device: torch.device, client: Client | None, say: Say
    ) -> None:
        if plan.is_served and not plan.drafter:
            raise StartupError("a fresh drafter is made like its target: give its directory")
        self.tokenizer = read_tokenizer(plan.drafter or plan.target)
        if not plan.is_served:
            require_same(read_tokenizer(plan.target), self.tokenizer)
        with quiet():  # a text that is longer than the model is cut into windows
            records = read_records(Path(plan.prompts), self.tokenizer)
            if plan.held_out:
                own = read_records(Path(plan.held_out), self.tokenizer)
                self.records, self.held_out = records, own
            else:
                self.records, self.held_out = split(records)
        if plan.drafter:
            self.drafter, self.dtype = read_drafter(plan.drafter)
        else:
            self.drafter = fresh_drafter(plan.target, plan.layers, plan.width, plan.seed)
            self.dtype = torch.bfloat16
        self.drafter = self.drafter.to(device)
        _require_room(plan, "drafter", self.drafter)
        self.teacher = self._teacher(plan, device, client, say)
        own = self.drafter.config.get_text_config().vocab_size
        self.vocabulary = min(own, self.teacher.vocabulary)

    def _teacher(
        self, plan: Distillation, device: torch.device, client: Client | None, say: Say
    ) -> Teacher:
        if client is not None:
            return ServedTeacher(client, self.tokenizer, say)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = read_model(plan.target, dtype, device)
        _require_room(plan, "target", model)
        return LocalTeacher(model, device, self.tokenizer)


def _require_room(plan: Distillation, role: str, model: Any) -> None:
    """See that a model holds texts of the plan's length.

    Raises:
        StartupError: it does not.
    """
    longest = model.config.get_text_config().max_position_embeddings
    if plan.length >= longest:
        raise StartupError(f"the {role} holds {longest} tokens: give a smaller length")


class _Run:
    def __init__(
        self,
        plan: Distillation,
        output: Path,
        parts: _Parts,
        say: Say,
        progress: Callable[[TrainingProgress], None],
        clock: Clock,
    ) -> None:
        self._plan, self._output, self._parts = plan, output, parts
        self._say, self._progress = say, progress
        self._folder = output / "run"
        common = parts.teacher, parts.vocabulary, self._folder
        self._held_out = HeldOut(plan, parts.held_out, *common)
        self._texts = TrainingTexts(plan, parts.records, *common, say)
        self._training = Training(
            parts.drafter,
            optimisers(parts.drafter, plan.rate),
            self._folder / "checkpoint.pt",
            plan.rate,
            lambda step, seconds: (
                step / plan.steps if plan.steps else seconds / (60 * plan.minutes)
            ),
            clock,
        )

    def go(self) -> Distilled:
        training, drafter = self._training, self._parts.drafter
        training.load()
        about = training.about
        if training.step:
            self._say(f"it goes on after step {training.step}")
        if not about:
            about.update(first=self._measured(), best=None, best_step=0, history=[])
            about["first_round"] = self._tokens_a_round()
            self._keep_best(about["first"])
            training.save()
        while training.done < 1:
            value = training.take(self._losses)
            if training.step % self._plan.measure_every == 0 or training.done >= 1:
                self._keep_best(self._measured())
                training.save()
                self._forget_worse()
            training.save_if_due()
            overlap = about["history"][-1][1]
            self._progress(
                TrainingProgress(training.step, training.done, training.seconds, value, overlap)
            )
        state = torch.load(self._best, map_location="cpu", weights_only=True)
        drafter.load_state_dict(state)
        rounds = self._tokens_a_round()
        outcome = Distilled(
            training.step,
            training.seconds,
            about["best_step"],
            {kind: Figures(*values) for kind, values in about["first"].items()},
            {kind: Figures(*values) for kind, values in about["best"].items()},
            {at: (about["first_round"][at], rounds[at]) for at in rounds},
        )
        self._write(outcome)
        return outcome

    def _losses(self) -> Iterator[Tensor]:
        """Of the rows of a step, as many at once as memory is planned for."""
        plan, parts, drafter = self._plan, self._parts, self._parts.drafter
        parts_of_it = self._texts.of(self._training.step, drafter)
        places = sum(int(batch.counts.sum()) for batch in parts_of_it)
        at_once = rows_at_once(plan.length, parts.vocabulary)
        for batch in parts_of_it:
            if parts.teacher.tells_little and batch.said is None and plan.divergence != _TOKENS:
                batch = replace(batch, said=parts.teacher.rows(batch.tokens))
            for first in range(0, len(batch.tokens), at_once):
                yield self._loss(batch[first : first + at_once]) / max(places, 1)

    def _loss(self, batch: Batch) -> Tensor:
        """The sum over the places that count."""
        plan, parts, drafter = self._plan, self._parts, self._parts.drafter
        said = batch.said
        if said is None and plan.divergence != _TOKENS:
            said = parts.teacher.rows(batch.tokens)
        device = drafter.device
        tokens, counts = batch.tokens.to(device), batch.counts.to(device)
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            logits = drafter(input_ids=tokens[:, :-1], use_cache=False).logits
        rows = None if said is None else said.to(device)
        each = loss(plan.divergence, logits[..., : parts.vocabulary], rows, tokens[:, 1:])
        return (each * counts).sum()

    def _measured(self) -> dict[str, tuple[list[float], list[float]]]:
        found = self._held_out.measure(self._parts.drafter)
        return {kind: (each.overlap, each.agreement) for kind, each in found.items()}

    def _tokens_a_round(self) -> dict[int, list[float]]:
        return {at: self._held_out.tokens_a_round(self._parts.drafter, at) for at in (0, 1)}

    def _keep_best(self, found: dict[str, tuple[list[float], list[float]]]) -> None:
        training, about = self._training, self._training.about
        means = {kind: Figures(*values).summary()["overlap"] for kind, values in found.items()}
        about["history"] = [*about["history"], [training.step, means, training.seconds]]
        if about["best"] is not None:
            before = [Figures(*values).summary()["overlap"] for values in about["best"].values()]
            if not sum(means.values()) > sum(before):  # nor where one is not a number
                return
        about["best"], about["best_step"] = found, training.step
        with writing(self._best) as fresh:
            torch.save(training.model.state_dict(), fresh)
        self._write(None)

    @property
    def _best(self) -> Path:
        """The float32 weights of the best drafter that the checkpoint knows."""
        found: Path = self._folder / f"best-{self._training.about['best_step']:07}.pt"
        return found

    def _forget_worse(self) -> None:
        for path in self._folder.glob("best-*"):
            if path != self._best:
                path.unlink()

    def _write(self, outcome: Distilled | None) -> None:
        parts, about = self._parts, self._training.about
        write_drafter(
            parts.drafter,
            parts.dtype,
            parts.tokenizer,
            card_of(self._plan, outcome),
            self._output,
            self._folder / "new",
        )
        history = {"plan": asdict(self._plan), "history": about["history"]}
        with writing(self._folder / "history.json") as fresh:
            fresh.write_text(json.dumps(history, indent=1) + "\n")


def _device_of(name: str) -> torch.device:
    found = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=found).device
    except (RuntimeError, AssertionError) as error:
        raise StartupError(
            f"device {name!r} cannot be used: {str(error).splitlines()[0]}"
        ) from None
