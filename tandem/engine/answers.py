"""What the engine answers asks with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.inference.feed import Drawn
from tandem.speculation.draft import Draft
from tandem.speculation.predictions import Predictions
from tandem.speculation.request.log_probs import TokenLogProb

if TYPE_CHECKING:  # methods without a model run where torch is not installed
    from torch import Tensor

    from tandem.verification import Verifier


@dataclass(slots=True, eq=False)
class Reviewed:
    """What a reviewer made of a draft, on the host.

    Attributes:
        kept: tokens of the draft that are kept.
        token_ids: these, and the one that the reviewer drew behind them, if there was a row for it.
        rows: the reviewer's row of each: ids (uint32) and weights (uint16), none of them 0.
    """

    kept: int
    token_ids: list[int]
    rows: list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]]


@dataclass(slots=True, eq=False)
class DrawnTree:
    """A tree on the host.

    Attributes:
        draft: of the draws that were some: where earlier siblings left nothing of a row there was
            nothing to draw, and nothing behind it.
        draws: which of the draws each node is.
    """

    draft: Draft
    draws: Sequence[int]


@dataclass(slots=True, eq=False)
class Scored:
    """A job's rows of a pass.

    Attributes:
        logits: [R, V], of all jobs of the pass.
        first: the job's first row.
        count: its rows.
        states: [S, layers, width] of all jobs of the pass that asked for hidden states, or of the
            job alone; None where it asked for none.
        first_state: the job's first row of `states`.
        prompt_states: rows of the job's states before those of its logits.
    """

    logits: Tensor
    first: int
    count: int
    states: Tensor | None = None
    first_state: int = 0
    prompt_states: int = 0


@dataclass(slots=True, eq=False)
class PredictedRows:
    """A job's predictions, on the device.

    Attributes:
        ids: [R, K] likeliest tokens of all jobs of the step that want as many, the likeliest first.
        weights: [R, K] theirs; None with one token a row.
        first: the job's first row.
        count: its rows.
    """

    ids: Tensor
    weights: Tensor | None
    first: int
    count: int


class LikeliestRows(NamedTuple):
    """A job's predictions, on the host.

    Attributes:
        ids: [R, K] likeliest tokens behind each row of the pass, the likeliest first.
        weights: [R, K] theirs, 0 where they are too unlikely; None with one token a row.
    """

    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.int32] | None

    def of(self, row: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]:
        """The tokens of a row that have weights; none where the row was not finite."""
        ids = self.ids[row].astype(np.uint32)
        if self.weights is None:
            return ids, np.ones(1, np.uint16)
        weights = self.weights[row].astype(np.uint16)
        return ids[weights > 0], weights[weights > 0]


@dataclass(slots=True, eq=False)
class Verdicts:
    """What one step decided for jobs that share a rule, on the device.

    Attributes:
        rule: of them all.
        carries: the rule's state of each, on the device.
        numbers: [B, N] float64, which go to the host.
        carried: how many of the N, the last ones, are the rule's state.
        states: see `kept_states`; None where none are wanted.
        states_stay: on the device.
    """

    rule: Verifier[Any]
    carries: Sequence[Any]
    numbers: Tensor
    carried: int
    states: Tensor | None = None
    states_stay: bool = False


@dataclass(slots=True, eq=False)
class DeviceVerdict:
    """A job's verdict on its draft, which may be on the device too: place `index` of a step's.

    Attributes:
        prompt_states: positions before place 0 whose hidden states come with it.
        predicted: that come with it; None for none.
    """

    verdicts: Verdicts
    index: int
    draft: Draft | Sequence[Drawn]
    prompt_states: int = 0
    predicted: PredictedRows | None = None


@dataclass(slots=True, eq=False)
class Decision:
    """A verdict on the host.

    Attributes:
        draft: that it is about.
        place: of the last kept node; 0 where none was kept.
        num_accepted: drafted tokens kept, the place's depth.
        next_token: the correction or bonus.
        overlaps: Σ min(p, q) of each node.
        carry: the rule's state, on the device.
        levels: the same as it travels.
        states: [positions, layers, width] hidden states of the prompt's end, of place 0 and of the
            kept path, bfloat16 as int16; None where none were wanted. On the device, where they
            were to stay there.
        dead_end: no token may come behind the place; `next_token` is none of the text's.
        log_probs: of each emitted token; none where they are not wanted.
        rows: the likeliest tokens behind each row of the pass; None where none are wanted.
        predictions: of places, out of `rows`; None where none are wanted.
    """

    draft: Draft
    place: int
    num_accepted: int
    next_token: int
    overlaps: list[float]
    carry: Any = None
    levels: list[tuple[float, int]] = field(default_factory=list)
    states: npt.NDArray[Any] | Tensor | None = None
    dead_end: bool = False
    log_probs: Sequence[TokenLogProb] = ()
    rows: LikeliestRows | None = None
    predictions: Predictions | None = None

    @property
    def emitted(self) -> list[int]:
        """The kept path, and the token behind it."""
        tokens = self.draft.emitted(self.place, self.next_token)
        return tokens[:-1] if self.dead_end else tokens
