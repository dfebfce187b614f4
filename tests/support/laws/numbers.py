"""Numbers of rows and drafts, and all that they follow from, by which they are remembered."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.asks import Review
from tandem.shaping.logits import shape
from tandem.shaping.text import ShapedRows
from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.verification import VERIFIERS
from tests.support.laws.trees.laws import stops


def told_of(draft: Draft) -> Any:
    """All that a rule is told of a draft, to be hashed."""
    rows = draft.ids.tobytes(), draft.weights.tobytes(), tuple(draft.rows_of_nodes())
    return tuple(draft.token_ids), tuple(draft.places()), tuple(draft.sizes), draft.distinct, rows


def said_of(shaped: ShapedRows) -> Any:
    """All that shaped rows are, to be hashed."""
    numbers = shaped.rows, shaped.ids, shaped.bias, shaped.seen, shaped.counts, shaped.bits
    told = tuple(None if each is None else each.tobytes() for each in numbers)
    return told, shaped.shaping, tuple(shaped.dead)


def reviewed(ask: Review, p: npt.NDArray[np.float64]) -> tuple[list[float], list[list[float]]]:
    """The chance of each place where a guess may end, and of each token there."""
    rule, proposal = VERIFIERS[ask.rule], Proposal.from_drafts([ask.guess])
    judged = rule.judged(proposal, torch.from_numpy(p)[None])
    accept = (judged.accept() * ask.leniency).clamp(max=1)
    chances: list[float] = stops(rule, proposal, accept)[0].tolist()
    places = map(torch.tensor, [[place] for place in range(len(chances))])
    return chances, [judged.residual(place)[0].tolist() for place in places]


def shaped_weights(rows: npt.NDArray[np.int64], shaped: ShapedRows) -> npt.NDArray[np.int64]:
    """Integer weights [R, V] of shaped rows."""
    laws = shape(torch.from_numpy(rows).double().log(), [(0, shaped)]).softmax(-1)
    return (laws / laws.amax(-1, keepdim=True) * 59).ceil().nan_to_num(1.0).long().numpy()
