"""What may become of a draft: which of its tokens are kept, and which token follows them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.speculation.draft import Draft


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """A round's end, as a drafter foresees it.

    Attributes:
        token_ids: the kept ones, and the one that follows them.
        chance: that the round ends so, as far as the drafter knows.
    """

    token_ids: tuple[int, ...]
    chance: float


def likeliest_outcomes(
    draft: Draft,
    following: Sequence[Sequence[tuple[int, float]]],
    acceptance: Sequence[float],
    most: int,
) -> list[RoundOutcome]:
    """The likeliest outcomes, the likeliest first.

    A round ends at a place if the path to it is kept and none of its children is. The token that
    follows is none of the children's, since theirs would have been kept. A twin has no place of its
    own: to keep it leads to its first sibling's.

    Args:
        draft: that is being verified.
        following: of each place, likely tokens after it with the logarithms of their
            probabilities.
        acceptance: of a node where its parent is kept, by its rank among its siblings; later ranks
            are as the last one.
        most: outcomes.
    """
    homes = draft.homes()
    reached = [1.0, *[0.0] * len(draft)]
    found: list[RoundOutcome] = []
    for place, children in enumerate(draft.tree.children):
        if place and homes[place - 1] != place:
            continue
        kept = [acceptance[min(rank, len(acceptance) - 1)] for rank in range(len(children))]
        for child, share in zip(children, kept, strict=True):
            reached[homes[child - 1]] += reached[place] * share
        ends = reached[place] * max(1 - sum(kept), 0.0)
        taken = {draft.token_ids[child - 1] for child in children}
        own = [(token, math.exp(value)) for token, value in following[place]]
        others = [(token, share) for token, share in own if token not in taken and share > 0]
        left = 1 - sum(share for token, share in own if token in taken)
        path = tuple(draft.token_ids[step - 1] for step in draft.path_to(place))
        found += [
            RoundOutcome((*path, token), ends * share / max(left, share)) for token, share in others
        ]
    return heapq.nlargest(most, found, key=lambda outcome: outcome.chance)
