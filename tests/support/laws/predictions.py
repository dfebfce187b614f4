"""Predictions of a target that is a table: what it would tell of the places of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tandem.speculation.draft import Draft
from tandem.speculation.predictions import Predictions, PredictionsWanted

# Integer weights of every token behind tokens; ids beyond the vocabulary are extra embeddings.
Rows = Callable[[tuple[int, ...]], npt.NDArray[np.int64]]


def predictions_of(
    wanted: PredictionsWanted, round_: int, draft: Draft, place: int, text: Sequence[int], row: Rows
) -> Predictions:
    """What the target tells of a round.

    Args:
        wanted: by the drafter.
        round_: its number.
        draft: with its probes.
        place: where the round ended.
        text: before the round.
        row: of the target, behind any tokens.
    """
    count, probes = len(draft), draft.probes
    paths = [
        (*text, *(draft.token_ids[at - 1] for at in draft.path_to(home)))
        for home in range(count + 1)
    ]
    for token_id, parent in zip(probes.token_ids, probes.parents, strict=True):
        paths.append((*paths[parent], token_id))
    if wanted.everywhere:
        twins = [node for node, home in enumerate(draft.homes(), 1) if home != node]
        places = [at for at in range(len(paths)) if at not in twins]
    else:
        places = [0, *draft.path_to(place), *probes.behind(place, count)]
    ids, weights = [], []
    for at in places:
        own = row(paths[at])
        order = np.argsort(-own, kind="stable")[: wanted.top]
        order = order[own[order] > 0]
        ids.append(order.astype(np.uint32))
        weights.append(own[order].astype(np.uint16))
    return Predictions(round_, places, ids, None if wanted.top == 1 else weights)


def extended(
    seed: int, vocab_size: int, known: Callable[[tuple[int, ...]], npt.NDArray[np.int64] | None]
) -> Rows:
    """A target's rows behind any tokens: its own where it has them, else some that hang on all
    tokens before.

    Args:
        seed: of those.
        vocab_size: see there.
        known: the target's own; None where it has none.
    """

    def row(text: tuple[int, ...]) -> npt.NDArray[np.int64]:
        own = known(text)
        if own is not None:
            return own
        random = np.random.default_rng((seed, *text))
        weights = random.integers(1, 60, vocab_size)
        weights[random.integers(vocab_size)] = 0
        return weights

    return row
