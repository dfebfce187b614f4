"""Hidden states of kept texts, with what the target said at the places after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.online.kept_text import KeptText
from tandem.online.learner import ToldRows, told_rows


@dataclass(frozen=True, slots=True)
class Roots:
    """Places that a head drafts after, among places that the target said a row of.

    Attributes:
        states: [m, layers, width] float32, of the target at all places.
        told: [m] its rows there.
        following: [m] int64, the token that came after each place.
        at: [n] int64, the roots among the places.
        paths: [n, depths] int64, the tokens after each root; 0 after a text's end.
        rows: [n, depths] int64: of each depth the place that many after the root, whose row says
            its token; −1 where none is known.
        text: [n] int64, which text a root is of.
        piece: [n] int64, ascending from 0: which unbroken run of places.
    """

    states: Tensor
    told: ToldRows
    following: Tensor
    at: Tensor
    paths: Tensor
    rows: Tensor
    text: Tensor
    piece: Tensor


def states_of(kept: npt.NDArray[Any]) -> Tensor:
    """[...] float32 of states as they are kept: bfloat16 as int16, or float32."""
    found = torch.from_numpy(np.array(kept))
    return (found.view(torch.bfloat16) if found.dtype == torch.int16 else found).float()


def roots_of(
    texts: Sequence[KeptText],
    vocabulary: int,
    most: int,
    depths: int,
    generator: np.random.Generator,
) -> Roots:
    """Roots of each text that follow each other, about one of its rows.

    Args:
        texts: at least one, with states.
        vocabulary: ids that the head has. Those beyond are read as the last one, and no row before
            one is learnt from.
        most: roots of a text.
        depths: of the head.
        generator: chooses.
    """
    parts: list[list[npt.NDArray[Any]]] = []
    count = pieces = 0
    for number, text in enumerate(texts):
        assert text.states is not None
        about = int(generator.integers(len(text.places)))
        begin = min(max(0, about - int(generator.integers(most))), max(0, len(text.places) - most))
        inside = slice(begin, begin + most + depths)  # with the rows of the last roots
        places = text.places[inside].astype(np.int64)
        following = text.token_ids[places + 1].astype(np.int64)
        # Which row is that of each place of the text; none is after its end.
        row_of = np.full(len(text.token_ids) + depths, -1)
        row_of[places] = np.where(following < vocabulary, count + np.arange(len(places)), -1)
        tokens = np.concatenate([text.token_ids.astype(np.int64), np.zeros(depths, np.int64)])
        piece = pieces + (np.diff(places[:most], prepend=places[0]) > 1).cumsum()
        pieces = int(piece[-1]) + 1
        behind = places[:most, None] + np.arange(1, depths + 1)
        parts.append(
            [
                text.states[inside],
                text.ids[inside],
                text.weights[inside],
                text.masses[inside],
                np.minimum(following, vocabulary - 1),
                count + np.arange(len(behind)),
                np.minimum(tokens[behind], vocabulary - 1),
                row_of[behind],
                np.full(len(behind), number),
                piece,
            ]
        )
        count += len(places)
    states, ids, weights, masses, *others = map(np.concatenate, zip(*parts, strict=True))
    told = told_rows(ids, weights, masses)
    return Roots(states_of(states), told, *map(torch.from_numpy, others))
