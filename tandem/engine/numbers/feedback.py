"""What drafters are told of rounds: picked where the verdicts are taken, and brought to the host.

Hidden states are those of what a round kept; predictions are the likeliest tokens at its places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.answers import Decision, DeviceFeedback, DeviceVerdict
from tandem.engine.asks import Decide
from tandem.speculation.categorical import largest
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import WHOLE_MASS, Feedback, FeedbackWanted, HiddenDtype, Row

# numpy has no bfloat16.
_AS_SENT = {
    HiddenDtype.BFLOAT16: (torch.bfloat16, torch.int16),
    HiddenDtype.FLOAT32: (torch.float32, torch.float32),
}
_ONE = np.ones(1, np.uint16)


def kept_states(asks: Sequence[Decide], numbers: Tensor) -> Tensor | None:
    """[B, D, layers, width]: of each draft, the states of the prompt's end (if they are wanted), of
    place 0, and of the kept path, in this order; what comes after them has no meaning. bfloat16 as
    int16.

    Args:
        asks: of one pass, which want the same layers and dtype, or all none.
        numbers: of their verdicts, see `Verdicts`; on the device.
    """
    wanted, states = asks[0].feedback, asks[0].scored.states
    if wanted is None or not wanted.columns or states is None:
        return None
    paths = [_paths(ask) for ask in asks]
    most, longest = max(map(len, paths)), max(len(path) for own in paths for path in own)
    table = [
        [path + path[-1:] * (longest - len(path)) for path in own + own[-1:] * (most - len(own))]
        for own in paths
    ]
    rows = torch.tensor(table).to(states.device, non_blocking=True)
    index = numbers[:, 0].long().clamp(0, most - 1)[:, None, None].expand(-1, 1, longest)
    picked = states.index_select(0, rows.gather(1, index).flatten())
    if wanted.columns != tuple(range(states.shape[1])):
        picked = torch.stack([picked[:, column] for column in wanted.columns], 1)
    rounded, sent = _AS_SENT[wanted.dtype]
    return picked.to(rounded).view(sent).view(len(asks), longest, *picked.shape[1:])


def _paths(ask: Decide) -> list[list[int]]:
    """For each place of a draft, the rows of the pass's states whose positions are kept with it."""
    scored, draft = ask.scored, ask.draft
    first = scored.first_state + scored.prompt_states
    before = list(range(scored.first_state, first))
    if not isinstance(draft, Draft) or draft.parents is None:
        return [[*before, *range(first, first + place + 1)] for place in range(len(draft) + 1)]
    rows = draft.row_of_places()
    return [
        [*before, first, *(first + rows[at] for at in draft.path_to(place))]
        for place in range(len(draft) + 1)
    ]


def feedback_of(asks: Sequence[Decide]) -> dict[int, DeviceFeedback]:
    """What each ask wants to be told, by its identity, with its predictions; nothing is computed
    for others.

    Args:
        asks: of one step.
    """
    found: dict[int, DeviceFeedback] = {}
    groups: dict[tuple[int, int], list[Decide]] = {}
    for ask in asks:
        if (wanted := ask.feedback) is not None:
            before = ask.scored.prompt_states
            found[id(ask)] = DeviceFeedback(wanted, ask.round, ask.position, before)
            if wanted.top:
                groups.setdefault((id(ask.scored.logits), wanted.top), []).append(ask)
    for (_, top), sharing in groups.items():
        scored, logits = [ask.scored for ask in sharing], sharing[0].scored.logits
        counts = [own.count + _probes(ask) for ask, own in zip(sharing, scored, strict=True)]
        rows = [
            row
            for own, count in zip(scored, counts, strict=True)
            for row in range(own.first, own.first + count)
        ]
        if len(rows) < len(logits):
            index = torch.tensor(rows).to(logits.device, non_blocking=True)
            logits = logits.index_select(0, index)
        told, first = _likeliest(logits.float(), top), 0
        for ask, count in zip(sharing, counts, strict=True):
            own = found[id(ask)]
            own.rows, own.first = told, first
            first += count
    return found


def _probes(ask: Decide) -> int:
    return len(ask.draft.probes) if isinstance(ask.draft, Draft) else 0


def _likeliest(logits: Tensor, top: int) -> Sequence[Tensor]:
    """[R, K] likeliest tokens of logits [R, V]; if there may be several, [R, K + 1] their weights,
    and the mass that they have together, of `WHOLE_MASS`."""
    if top == 1:
        return (largest(logits)[1].int(),)
    values, ids = logits.topk(min(top, logits.shape[1]))
    mass = logits.softmax(-1).gather(-1, ids).sum(-1, keepdim=True)
    shares = torch.cat([(values - values[:, :1]).exp(), mass], -1)
    # A row that is not finite gets no weight; its verdict says so, or it is a probe's.
    return ids.int(), shares.nan_to_num(0.0).mul(WHOLE_MASS).round().int()


def predicted(
    wanted: FeedbackWanted,
    draft: Draft,
    place: int,
    ids: npt.NDArray[np.int32],
    weights: npt.NDArray[np.int32] | None = None,
) -> dict[int, Row]:
    """The predictions of the places that are wanted; none of a row that was not finite.

    Args:
        wanted: says which places.
        draft: with its probes.
        place: where the round ended.
        ids: [R, K] likeliest tokens of the pass, from the draft's first row on; the rows of its
            probes are after those of its places.
        weights: [R, K + 1] theirs, 0 where they are too unlikely, and the row's mass; None with one
            token a row.
    """
    count, probes = len(draft), len(draft.probes)
    row_of = list(draft.row_of_places())
    row_of += range(max(row_of) + 1, max(row_of) + 1 + probes)
    if wanted.everywhere:
        places = [0, *draft.computed(), *range(count + 1, count + 1 + probes)]
    else:
        places = [0, *draft.path_to(place), *draft.probes.behind(place, count)]
    return dict(_finite(places, row_of, ids, weights))


def _finite(
    places: Sequence[int],
    row_of: Sequence[int],
    ids: npt.NDArray[np.int32],
    weights: npt.NDArray[np.int32] | None,
) -> Iterator[tuple[int, Row]]:
    for place in places:
        own = ids[row_of[place]].astype(np.uint32)
        if weights is None:
            yield place, Row(own, _ONE)
            continue
        told = weights[row_of[place]]
        heavy, mass = told[:-1].astype(np.uint16), min(max(int(told[-1]), 1), WHOLE_MASS)
        if (kept := heavy > 0).any():
            yield place, Row(own[kept], heavy[kept], mass)


def on_host(
    verdict: DeviceVerdict,
    decision: Decision,
    states: npt.NDArray[Any] | Tensor | None,
    of_rows: Mapping[int, npt.NDArray[Any]],
) -> Feedback:
    """What a verdict tells, cut out of what its step brought.

    Args:
        verdict: brings feedback along.
        decision: the same, on the host.
        states: of its step, see `kept_states`, wherever they are to be; None for none.
        of_rows: what its step tells of rows, by the identity of what was on the device.
    """
    told = verdict.feedback
    assert told is not None
    first, own = told.position - told.prompt_states, None
    if states is not None:
        own = states[verdict.index, : told.prompt_states + 1 + decision.num_accepted]
    positions = range(first, first + (0 if own is None else len(own)))
    if not told.rows:
        return Feedback(told.round, positions, own)
    likeliest = [of_rows[id(part)][told.first :] for part in told.rows]
    rows = predicted(told.wanted, decision.draft, decision.place, *likeliest)
    return Feedback(told.round, positions, own, rows)
