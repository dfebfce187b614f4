"""Hidden states of what rounds kept, picked where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.asks import Decide
from tandem.speculation.draft import Draft
from tandem.speculation.hidden_dtype import HiddenDtype

# numpy has no bfloat16.
_AS_SENT = {
    HiddenDtype.BFLOAT16: (torch.bfloat16, torch.int16),
    HiddenDtype.FLOAT32: (torch.float32, torch.float32),
}


def kept_states(asks: Sequence[Decide], numbers: Tensor) -> Tensor | None:
    """[B, D, layers, width]: of each draft, the states of the prompt's end (if they are wanted), of
    place 0, and of the kept path, in this order; what comes behind them has no meaning. bfloat16 as
    int16.

    Args:
        asks: of one pass, which want the same layers and dtype, or all none.
        numbers: of their verdicts, see `Verdicts`; on the device.
    """
    wanted, states = asks[0].wanted, asks[0].scored.states
    if wanted is None or states is None:
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
    if wanted.layers != tuple(range(states.shape[1])):
        picked = torch.stack([picked[:, layer] for layer in wanted.layers], 1)
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
