"""Which texts a step learns from: a function of the step's number, so that a resume is exact."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.distillation.divergences import TargetRows
from tandem.distillation.plan import Distillation
from tandem.distillation.teachers import Say, Teacher, continue_rows
from tandem.distillation.texts import Record, beginnings, stream_of, windows
from tandem.whole_files import writing

# Texts that the target writes at once; each is learnt from a few times.
_BLOCK, _TIMES = 512, 4
# Rows of one pass that continues texts.
_AT_ONCE = 64
# Apart from each other, whatever the seed is.
_TARGETS, _OWN = 1, 2


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts of a step.

    Attributes:
        tokens: [rows, time + 1] of int64.
        counts: [rows, time] of bool: whose place counts.
        said: [rows, time, k] by the target, where it wrote the texts; None where it is to be asked.
    """

    tokens: Tensor
    counts: Tensor
    said: TargetRows | None = None

    def __getitem__(self, rows: slice | list[int]) -> Batch:
        said = None if self.said is None else self.said[rows]
        return Batch(self.tokens[rows], self.counts[rows], said)


class TrainingTexts:
    """The texts of a run.

    Args:
        plan: of the run.
        records: to learn from.
        teacher: continues prompts where the data asks for it.
        vocabulary: ids that both models know.
        folder: of the run; keeps what the target wrote, as long as it is learnt from.
        say: called with how far the target's writing is.
    """

    def __init__(
        self,
        plan: Distillation,
        records: Sequence[Record],
        teacher: Teacher,
        vocabulary: int,
        folder: Path,
        say: Say = lambda sentence: None,
    ) -> None:
        self._say = say
        self._plan, self._records, self._teacher = plan, records, teacher
        self._vocabulary, self._folder = vocabulary, folder / "texts"
        # No more than four times a step's: their keys and values are held while they are written.
        self._at_once = min(_AT_ONCE, 1 << ((4 * plan.rows).bit_length() - 1))
        self._stream = stream_of(records)
        self._block: tuple[int, Batch] | None = None

    def of(self, step: int, drafter: Any) -> list[Batch]:
        """The texts of a step, in one or two parts.

        Args:
            step: its number.
            drafter: as it is before the step; writes its own texts.
        """
        plan = self._plan
        if plan.data == "corpus":
            tokens = windows(self._stream, plan.rows, plan.length, step, plan.seed)
            return [Batch(torch.from_numpy(tokens), torch.ones(plan.rows, plan.length).bool())]
        own = {"target": 0, "on-policy": plan.rows, "mixed": (plan.rows + 1) // 2}[plan.data]
        parts = [self._own(step, own, drafter)] if own else []
        return [*parts, *self._targets(step, plan.rows - own)]

    def _own(self, step: int, rows: int, drafter: Any) -> Batch:
        tokens, known = self._beginnings(rows, _OWN, step)
        generator = torch.Generator().manual_seed(seed_of(self._plan.seed, _OWN, step))
        at = tokens.to(drafter.device), known.to(drafter.device)
        written = continue_rows(drafter, *at, self._vocabulary, generator).cpu()
        return Batch(written, counted(written, known, self._teacher.ends))

    def _targets(self, step: int, rows: int) -> list[Batch]:
        """Of blocks that are each read a few times, in another order each time."""
        picked: dict[int, list[int]] = {}
        for place in range(step * rows, (step + 1) * rows):
            number, within = divmod(place, _BLOCK * _TIMES)
            time, turn = divmod(within, _BLOCK)
            order = np.random.default_rng((self._plan.seed, number, time)).permutation(_BLOCK)
            picked.setdefault(number, []).append(int(order[turn]))
        return [self._block_of(number)[places] for number, places in picked.items()]

    def _block_of(self, number: int) -> Batch:
        if self._block is None or self._block[0] != number:
            self._block = None
            folder = self._folder / f"{number:05}"
            # A run that is cut while it waits for this block goes on in the one before.
            for stale in self._folder.glob("*"):
                if stale.name < f"{number - 1:05}":
                    shutil.rmtree(stale, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            parts = [self._written(folder, number, part) for part in range(_BLOCK // self._at_once)]
            tokens, counts, values, ids = (torch.cat(each) for each in zip(*parts, strict=True))
            self._block = number, Batch(tokens, counts, TargetRows(values, ids))
        return self._block[1]

    def _written(self, folder: Path, number: int, part: int) -> tuple[Tensor, ...]:
        """Texts that the target wrote, whose places count, and what it said (values and ids); drawn
        where they are not there yet."""
        kind = number * _BLOCK + part
        tokens, known = self._beginnings(self._at_once, _TARGETS, kind)
        path = folder / f"{part:02}.safetensors"
        if path.exists():
            found = load_file(path)
        else:
            seed = seed_of(self._plan.seed, _TARGETS, kind)
            written, said = self._teacher.continued(tokens, known, self._vocabulary, seed)
            assert said.ids is not None
            found = {"tokens": written, "values": said.log_probs, "ids": said.ids.int()}
            with writing(path) as fresh:
                save_file(found, fresh)
            there = (part + 1) * self._at_once
            self._say(f"the target has written {there} of its next {_BLOCK} texts")
        counts = counted(found["tokens"], known, self._teacher.ends)
        return found["tokens"], counts, found["values"], found["ids"].long()

    def _beginnings(self, rows: int, kind: int, number: int) -> tuple[Tensor, Tensor]:
        generator = np.random.default_rng((self._plan.seed, kind, number))
        tokens, known = beginnings(self._records, rows, self._plan.length, generator)
        return torch.from_numpy(tokens), torch.from_numpy(known)


def seed_of(*parts: int) -> int:
    """A seed of numbers, the same everywhere; below 2^31."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0]) >> 1


def counted(tokens: Tensor, known: Tensor, ends: Sequence[int]) -> Tensor:
    """Whose places count [rows, time] of texts [rows, time + 1]: from each prompt's last token to
    the text's end."""
    place = torch.arange(tokens.shape[1] - 1)
    counts = place >= known[:, None] - 1
    ended = torch.isin(tokens, torch.tensor(ends, dtype=torch.int64))
    ended &= torch.arange(tokens.shape[1]) >= known[:, None]
    return counts & (ended.cumsum(1)[:, :-1] == 0)
