"""How well a drafter matches its target on texts that it did not learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.distillation.divergences import TargetRows, tvd
from tandem.distillation.plan import Distillation
from tandem.distillation.teachers import KnownTexts, Teacher, continue_rows
from tandem.distillation.texts import Record, beginnings, pieces
from tandem.distillation.training_texts import Batch, counted, seed_of
from tandem.whole_files import writing

# Texts of each kind.
_ROWS = 32
# Logits that are held at once, of either model: 256 MiB of float32.
MOST_LOGITS = 1 << 26
# Places of a text where a draft begins, and its length.
_DRAFTS, GAMMA = 8, 4
# Seeds apart from those of the texts to learn from.
_SAMPLES, _DRAWS = 3, 4


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a drafter, on texts of one kind; each list has a value a text.

    Attributes:
        overlap: mean of Σ min(p, q): the probability that a drafted token is accepted at
            temperature 1 (α).
        agreement: share of places with the same likeliest token: the same at temperature 0.
    """

    overlap: list[float]
    agreement: list[float]

    def summary(self) -> dict[str, float]:
        """Means, and the standard errors of texts."""
        return {
            "overlap": _mean(self.overlap),
            "overlap_error": _error(self.overlap),
            "agreement": _mean(self.agreement),
            "agreement_error": _error(self.agreement),
        }


class HeldOut:
    """Texts to measure on: windows of what is held out, and the target's own continuations of
    prompts of it.

    Attributes:
        texts: by kind: "text", where what is held out has more than prompts, and "target".

    Args:
        plan: of the run.
        records: that are held out.
        teacher: the target.
        vocabulary: ids that both models know.
        folder: of the run; keeps what the target wrote.
    """

    def __init__(
        self,
        plan: Distillation,
        records: Sequence[Record],
        teacher: Teacher,
        vocabulary: int,
        folder: Path,
    ) -> None:
        self._teacher, self._vocabulary, self._seed = teacher, vocabulary, plan.seed
        self._rows: dict[tuple[str, int], TargetRows] = {}
        self._at_once = rows_at_once(plan.length, vocabulary)
        text, counts = pieces(records, _ROWS, plan.length, np.random.default_rng(_SAMPLES))
        tokens, known = beginnings(records, _ROWS, plan.length, np.random.default_rng(_SAMPLES))
        prompts, sizes = torch.from_numpy(tokens), torch.from_numpy(known)
        path = folder / "held_out.npy"
        if path.exists():
            written = torch.from_numpy(np.load(path))
        else:
            seed = seed_of(plan.seed, _SAMPLES)
            written, _ = teacher.continued(prompts, sizes, vocabulary, seed)
            with writing(path) as fresh, fresh.open("wb") as file:
                np.save(file, written.numpy())
        self.texts = {"target": Batch(written, counted(written, sizes, teacher.ends))}
        if len(text):
            own = Batch(torch.from_numpy(text), torch.from_numpy(counts))
            self.texts = {"text": own, **self.texts}

    def measure(self, drafter: Any) -> dict[str, Figures]:
        """The figures of a drafter by kind of text."""
        return {kind: self._figures(kind, batch, drafter) for kind, batch in self.texts.items()}

    @torch.no_grad()
    def _figures(self, kind: str, batch: Batch, drafter: Any) -> Figures:
        overlap: list[float] = []
        agreement: list[float] = []
        for first in range(0, len(batch.tokens), self._at_once):
            part = batch[first : first + self._at_once]
            tokens, counts = part.tokens, part.counts
            rows = self._told(kind, first, tokens)
            logits = drafter(input_ids=tokens[:, :-1].to(drafter.device), use_cache=False).logits
            found = logits.float().cpu()[..., : self._vocabulary]
            missed = tvd(*rows.beside(found))
            likeliest = rows.log_probs[..., : self._vocabulary].argmax(-1)
            if rows.ids is not None:
                likeliest = rows.ids.gather(-1, likeliest[..., None])[..., 0]
            same = (likeliest == found.argmax(-1)).float()
            weights = counts.float() / counts.sum(1, keepdim=True).clamp(min=1)
            overlap += ((1 - missed) * weights).sum(1).tolist()
            agreement += (same * weights).sum(1).tolist()
        return Figures(overlap, agreement)

    def _told(self, kind: str, first: int, tokens: Tensor) -> TargetRows:
        """Rows of a service are few numbers, and are asked for once."""
        if (kind, first) in self._rows:
            return self._rows[kind, first]
        rows = self._teacher.rows(tokens).to(torch.device("cpu"))
        if rows.ids is not None:
            self._rows[kind, first] = rows
        return rows

    @torch.no_grad()
    def tokens_a_round(self, drafter: Any, temperature: int) -> list[float]:
        """What a round of 4 drafted tokens emits at the mean, a value for each of the target's
        texts: 1 + Σ_i Π_{j ≤ i} min(1, p_j / q_j) along drawn drafts, as the rule `token` accepts
        them; at temperature 0 the likeliest tokens that agree.

        Args:
            drafter: that drafts.
            temperature: 1 or 0.
        """
        batch = self.texts["target"]
        length = batch.tokens.shape[1] - 1
        emitted = torch.zeros(len(batch.tokens))
        rounds = torch.zeros(len(batch.tokens))
        known = [KnownTexts() for _ in torch.split(batch.tokens, self._at_once)]
        for number in range(_DRAFTS):
            size = 1 + (number + 1) * (length - GAMMA - 1) // (_DRAFTS + 1)
            counted_here = batch.counts[:, size - 1]
            generator = torch.Generator().manual_seed(seed_of(self._seed, _DRAWS, number))
            parts = [
                self._drafted(drafter, before, generator if temperature else None, own)
                for before, own in zip(
                    torch.split(batch.tokens[:, :size], self._at_once), known, strict=True
                )
            ]
            found = torch.cat(parts)
            emitted += torch.where(counted_here, found, 0.0)
            rounds += counted_here
        return [float(a / b) for a, b in zip(emitted, rounds, strict=True) if b]

    def _drafted(
        self, drafter: Any, before: Tensor, generator: torch.Generator | None, known: KnownTexts
    ) -> Tensor:
        """Expected tokens [rows] of a round after texts [rows, size]; None drafts greedily."""
        rows, size = before.shape
        device = drafter.device
        room = torch.zeros(rows, GAMMA, dtype=torch.int64)
        drafted = continue_rows(
            drafter,
            torch.cat([before, room], 1).to(device),
            torch.full((rows,), size, device=device),
            self._vocabulary,
            generator,
        )
        q = drafter(input_ids=drafted, use_cache=False, logits_to_keep=GAMMA + 1).logits
        q = q[:, :GAMMA, : self._vocabulary].float().cpu()
        drafted = drafted.cpu()
        told = self._teacher.rows(drafted, GAMMA, known).to(torch.device("cpu"))
        p = told.log_probs
        tokens = drafted[:, -GAMMA:, None]
        if generator is not None:
            if told.ids is None:
                likely = p.gather(-1, tokens)[..., 0]
            else:
                hit = told.ids == tokens
                likely = torch.where(hit, p, -torch.inf).amax(-1)
            own = q.log_softmax(-1).gather(-1, tokens)[..., 0]
            accepted = (likely - own).exp().clamp(max=1)
        else:
            best = p[..., : self._vocabulary].argmax(-1)
            if told.ids is not None:
                best = told.ids.gather(-1, best[..., None])[..., 0]
            accepted = (best == tokens[..., 0]).float()
        expected: Tensor = 1 + accepted.cumprod(1).sum(1)
        return expected


def rows_at_once(length: int, vocabulary: int) -> int:
    """Texts of a length whose logits are held at once."""
    return max(1, MOST_LOGITS // (length * vocabulary))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
