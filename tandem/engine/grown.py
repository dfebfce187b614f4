"""Draws that hang in a tree, made a draft on the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tandem.engine.asks import Decided, Grown, Host
from tandem.speculation.draft import Draft

# What one step drew, on the host: tokens, ids and weights of its rows.
Arrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]


def grown(host: Host, there: Mapping[int, Arrays]) -> Grown | None:
    """The draft of a tree; None where its first distribution was not finite.

    A draw of which its earlier siblings left nothing is none, and nothing is behind it: whether
    there is one follows from what was drawn before. So it is behind a row that is not finite.

    Args:
        host: the ask.
        there: each step's draws, by their identity.
    """
    assert not isinstance(host.answers, Decided)
    assert host.places is not None
    tokens: list[int] = []
    parents: list[int] = []
    row_of: list[int] = []
    draws: list[int] = []
    places = {0: 0}
    rows: dict[tuple[int, int, int], int] = {}
    parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    taken: dict[int, set[int]] = {}
    for index, (drawn, hung) in enumerate(zip(host.answers, host.places, strict=True)):
        place = places.get(hung)
        if place is None:
            continue
        all_tokens, all_ids, all_weights = there[id(drawn.draws)]
        row, rank = divmod(drawn.index, drawn.draws.siblings)
        token = int(all_tokens[drawn.index])
        sent = all_weights[row] > 0
        ids, weights = all_ids[row][sent], all_weights[row][sent]
        siblings = taken.setdefault(place, set())
        if not len(ids):
            if not draws:
                return None
            continue
        if drawn.draws.certain:
            ids, weights = ids[:0], weights[:0]
        elif host.distinct and (token in siblings or token not in ids):
            continue
        if host.distinct and token in siblings:
            continue
        # A certain row belongs to one token; others are shared by all draws behind a place.
        key = (id(drawn.draws), row, rank if drawn.draws.certain else 0)
        if key not in rows:
            rows[key] = len(parts)
            parts.append((ids[:0], weights[:0]) if len(ids) == 1 else (ids, weights))
        siblings.add(token)
        tokens.append(token)
        parents.append(place)
        row_of.append(rows[key])
        draws.append(index)
        places[index + 1] = len(tokens)
    draft = Draft(
        tokens,
        [len(ids) for ids, _ in parts],
        np.concatenate([ids for ids, _ in parts]).astype(np.uint32),
        np.concatenate([weights for _, weights in parts]).astype(np.uint16),
        parents,
        row_of,
        host.distinct,
    )
    return Grown(draft, draws)
