"""A text that was drafted for, and what its target said of it. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.errors import StartupError
from tandem.speculation.feedback import Feedback, FeedbackWanted, Row

# Likeliest tokens of a row that are told and kept.
TOP = 64
# Rows of a text that are kept, of the rejected places first: 0.8 MiB.
_MOST_ROWS = 2048


@dataclass(frozen=True, eq=False, slots=True)
class KeptText:
    """A text, and the target's rows at some of its places.

    Attributes:
        token_ids: [n] uint32, prompt and emitted tokens.
        places: [m] int32, ascending: the token behind which each row stands; below n - 1.
        ids: [m, TOP] uint32, the likeliest tokens.
        weights: [m, TOP] uint16, theirs relative to the likeliest; 0 where a row has fewer.
        rejected: [m] bool, where a drafted token was not kept.
        masses: [m] uint16, of the rows, see `Row`; 0 where it is not known.
        held_out: whether it is measured on, and never learnt from; see `Holdout`.
    """

    token_ids: npt.NDArray[np.uint32]
    places: npt.NDArray[np.int32]
    ids: npt.NDArray[np.uint32]
    weights: npt.NDArray[np.uint16]
    rejected: npt.NDArray[np.bool_]
    masses: npt.NDArray[np.uint16]
    held_out: bool = False


def wish_of(wanted: FeedbackWanted, method: str) -> FeedbackWanted:
    """What a drafter wants to be told that learns too.

    Raises:
        StartupError: the method wants other predictions.
    """
    if wanted.top:
        raise StartupError(
            f"ONLINE: the method {method} does not learn, since it reads predictions of another"
            " kind. Set ONLINE=0, or take the method model"
        )
    return replace(wanted, top=TOP)


@dataclass
class HeardText:
    """What is heard of a sequence, round by round. Event loop.

    Attributes:
        token_ids: of the text so far.
        epoch: of learning when the text began; see `Learning`.
    """

    token_ids: list[int]
    epoch: int = 0
    _rows: list[tuple[int, Row, bool]] = field(default_factory=list)

    def hear(self, emitted: Sequence[int], told: Sequence[Feedback], depth: int) -> None:
        """A step came.

        Args:
            emitted: tokens since the last step.
            told: of the target's passes since then.
            depth: of the last draft, in tokens of its longest path.
        """
        first = len(self.token_ids) - 1
        self.token_ids += emitted
        rows = list(((told[-1].predicted or {}) if told else {}).values())
        # Otherwise other rounds came in between, or a row was not finite.
        if len(rows) == len(emitted) <= depth + 1:
            rejected = len(emitted) <= depth
            for number, row in enumerate(rows):
                last = rejected and number == len(rows) - 1
                if last or len(self._rows) < _MOST_ROWS:
                    # Not the whole message.
                    own = Row(row.ids.copy(), row.weights.copy(), row.mass)
                    self._rows.append((first + number, own, last))
        if len(self._rows) >= 2 * _MOST_ROWS:
            self._rows = self._chosen()

    def _chosen(self) -> list[tuple[int, Row, bool]]:
        """Rejected places first, in the order of the text."""
        most = sorted(self._rows, key=lambda each: not each[2])[:_MOST_ROWS]
        return sorted(most, key=lambda each: each[0])

    @property
    def kept(self) -> KeptText | None:
        """What there is to keep; None for nothing."""
        if not self._rows:
            return None
        rows = self._chosen()
        ids = np.zeros((len(rows), TOP), np.uint32)
        weights = np.zeros((len(rows), TOP), np.uint16)
        for at, (_, row, _) in enumerate(rows):
            size = min(len(row.ids), TOP)
            ids[at, :size], weights[at, :size] = row.ids[:size], row.weights[:size]
        return KeptText(
            np.array(self.token_ids, np.uint32),
            np.array([place for place, _, _ in rows], np.int32),
            ids,
            weights,
            np.array([rejected for _, _, rejected in rows], np.bool_),
            np.array([row.mass for _, row, _ in rows], np.uint16),
        )


def packed(texts: Sequence[KeptText]) -> dict[str, npt.NDArray[Any]]:
    """Texts as arrays."""
    return {
        "tokens": np.array([len(each.token_ids) for each in texts], np.int32),
        "rows": np.array([len(each.places) for each in texts], np.int32),
        **{
            name: np.concatenate([getattr(each, name) for each in texts])
            for name in ("token_ids", "places", "ids", "weights", "masses")
        },
        "rejected": np.concatenate([each.rejected for each in texts]).astype(np.uint8),
        "held_out": np.array([each.held_out for each in texts], np.uint8),
    }


def unpacked(arrays: Mapping[str, npt.NDArray[Any]]) -> list[KeptText]:
    """Texts from arrays.

    Raises:
        ValueError, KeyError: they are none.
    """
    tokens, rows = (np.cumsum(arrays[name])[:-1] for name in ("tokens", "rows"))
    parts = [
        np.split(arrays["token_ids"], tokens),
        *(np.split(arrays[name], rows) for name in ("places", "ids", "weights")),
        np.split(arrays["rejected"].astype(np.bool_), rows),
        # Files of an earlier version have none.
        np.split(arrays.get("masses", np.zeros(len(arrays["places"]), np.uint16)), rows),
        arrays.get("held_out", np.zeros(len(tokens) + 1)).astype(np.bool_).tolist(),
    ]
    return [KeptText(*each) for each in zip(*parts, strict=True)]
