"""How many tokens of a drafted distribution to send: overlap lost against bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from benchmarks.sweep.recorded import Recorder, Texts
from tandem.speculation.categorical import Categorical

SUPPORTS = (16, 64, 256, 512, 1024, 4096, 0)
# The drafter's default.
DRAFT_MASS = 0.999
GAMMA = 4
# An id has 4 bytes, a weight 2.
_ENTRY_BYTES = 6


@dataclass(frozen=True)
class SupportSize:
    """What a limit costs and saves.

    Attributes:
        support: the most tokens of a row; 0 sends the full vocabulary.
        overlap: mean Σ min(p, q) at positions of the target's texts.
        overlap_lost: as a share of the untruncated overlap.
        bytes_a_round: mean size of a round's distributions at gamma 4.
        positions: number of measured positions.
    """

    support: int
    overlap: float
    overlap_lost: float
    bytes_a_round: float
    positions: int


def support_sizes(recorder: Recorder, texts: Iterable[Texts]) -> list[SupportSize]:
    """Measure every limit on the same rows."""
    exact, positions = 0.0, 0
    overlaps, entries = dict.fromkeys(SUPPORTS, 0.0), dict.fromkeys(SUPPORTS, 0)
    for batch in texts:
        p, q = recorder.rows(batch)
        exact += torch.minimum(p, q).sum().item()
        positions += len(p)
        for support in SUPPORTS:
            row = Categorical.quantize(q, DRAFT_MASS, support)
            sent = torch.zeros_like(q).scatter_(1, row.ids, row.weights.to(q.dtype))
            sent /= sent.sum(1, keepdim=True)
            overlaps[support] += torch.minimum(p, sent).sum().item()
            entries[support] += int((row.weights > 0).sum())
    return [
        SupportSize(
            support,
            overlaps[support] / positions,
            1 - overlaps[support] / exact,
            entries[support] / positions * GAMMA * _ENTRY_BYTES,
            positions,
        )
        for support in SUPPORTS
    ]
