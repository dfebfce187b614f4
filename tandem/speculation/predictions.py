"""What a target would go on with at places of a round, by its own logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Likeliest tokens at a place.
MOST_PREDICTED = 256


class PredictionsWanted(NamedTuple):
    """Predictions that a drafter asks for, see `FeedbackSpec` in common.proto.

    Attributes:
        top: likeliest tokens at each place, 1..256; with 1 no weights come with them.
        everywhere: at all places, and not only at those that are kept.
    """

    top: int
    everywhere: bool = False

    @property
    def bytes_each(self) -> int:
        """Of a place, as it is sent."""
        return 4 if self.top == 1 else 6 * self.top


class Row(NamedTuple):
    """A distribution with integer weights, the likeliest token first.

    Attributes:
        ids: [K] uint32.
        weights: [K] uint16, none of them 0.
    """

    ids: npt.NDArray[np.uint32]
    weights: npt.NDArray[np.uint16]


@dataclass(frozen=True, eq=False)
class Predictions:
    """Of a round's places.

    Attributes:
        round: see there.
        places: ascending, see `Draft`; those of probes behind those of candidates.
        ids: the likeliest tokens of each place, the likeliest first.
        weights: theirs; None where each place has one token.
    """

    round: int
    places: Sequence[int]
    ids: Sequence[npt.NDArray[np.uint32]]
    weights: Sequence[npt.NDArray[np.uint16]] | None = None

    def likeliest(self) -> dict[int, int]:
        """The likeliest token at each place."""
        return {place: int(ids[0]) for place, ids in zip(self.places, self.ids, strict=True)}

    def rows(self) -> dict[int, Row]:
        """The row of each place; of one token where there are no weights."""
        weights = self.weights or [np.ones(1, np.uint16)] * len(self.ids)
        return {
            place: Row(ids, own)
            for place, ids, own in zip(self.places, self.ids, weights, strict=True)
        }
