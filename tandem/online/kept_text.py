"""A text that was drafted for, and what its target said of it. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tandem.errors import StartupError
from tandem.speculation.feedback import Feedback, FeedbackWanted, Row

# Likeliest tokens of a row that are told and kept.
TOP = 64
# Rows of a text that are kept, of the rejected places first: 0.8 MiB. Fewer for a head that
# remembers states, which are kept in an unbroken run; and where the target's hidden states at these
# places would take more than 2 MiB.
_MOST_ROWS, _MOST_REMEMBERED, _MOST_STATE_BYTES = 2048, 512, 1 << 21


@dataclass(frozen=True, eq=False, slots=True)
class KeptText:
    """A text, and the target's rows at some of its places.

    Attributes:
        token_ids: [n] uint32, prompt and emitted tokens.
        places: [m] int32, ascending: the token after which each row stands; below n - 1.
        ids: [m, TOP] uint32, the likeliest tokens.
        weights: [m, TOP] uint16, theirs relative to the likeliest; 0 where a row has fewer.
        rejected: [m] bool, where a drafted token was not kept.
        masses: [m] uint16, of the rows, see `Row`; 0 where it is not known.
        held_out: whether it is measured on, and never learnt from; see `Holdout`.
        states: [m, layers, width] the target's hidden states at the places, as they came: bfloat16
            as int16, or float32; None for a drafter that reads none.
    """

    token_ids: npt.NDArray[np.uint32]
    places: npt.NDArray[np.int32]
    ids: npt.NDArray[np.uint32]
    weights: npt.NDArray[np.uint16]
    rejected: npt.NDArray[np.bool_]
    masses: npt.NDArray[np.uint16]
    held_out: bool = False
    states: npt.NDArray[Any] | None = None

    @property
    def bytes(self) -> int:
        """That it takes."""
        arrays = (self.token_ids, self.places, self.ids, self.weights, self.rejected, self.masses)
        states = 0 if self.states is None else self.states.nbytes
        return sum(each.nbytes for each in arrays) + states


@dataclass(frozen=True, slots=True)
class KeptStates:
    """What a drafter that reads hidden states keeps beside rows.

    Attributes:
        bytes: of the states of a place; 0 for a drafter that reads none.
        depths: rows after a state that are learnt from it.
        remembers: whether the head does, see `HeadScorer`: the places follow each other.
    """

    bytes: int = 0
    depths: int = 0
    remembers: bool = False

    @property
    def most_rows(self) -> int:
        """Of a text."""
        most = _MOST_REMEMBERED if self.remembers else _MOST_ROWS
        return min(most, _MOST_STATE_BYTES // self.bytes) if self.bytes else most


NO_STATES = KeptStates()


class _HeardRow(NamedTuple):
    """A row after the token at a place; whether a drafted token was not kept there; the state."""

    place: int
    row: Row
    rejected: bool
    state: npt.NDArray[Any] | None


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
        keeps: of hidden states.
    """

    token_ids: list[int]
    epoch: int = 0
    keeps: KeptStates = NO_STATES
    _rows: list[_HeardRow] = field(default_factory=list)

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
            states = self._states(told[-1], first, len(rows))
            rejected = len(emitted) <= depth
            for number, (row, state) in enumerate(zip(rows, states, strict=False)):
                last = rejected and number == len(rows) - 1
                if state is not None and not _is_finite(state):
                    continue
                # A rejected place is learnt from with the states before it.
                if last or self.keeps.depths or len(self._rows) < self.keeps.most_rows:
                    # Not the whole message.
                    own = Row(row.ids.copy(), row.weights.copy(), row.mass)
                    kept = None if state is None else state.copy()
                    self._rows.append(_HeardRow(first + number, own, last, kept))
        if len(self._rows) >= 2 * self.keeps.most_rows:
            self._rows = self._chosen()

    def _states(self, told: Feedback, first: int, count: int) -> Sequence[Any]:
        """The state of each row, None for each where none are kept; nothing where they are of other
        places."""
        if not self.keeps.bytes:
            return [None] * count
        there = list(told.positions) == [*range(first, first + count)]
        return told.states if there and told.states is not None else []

    def _chosen(self) -> list[_HeardRow]:
        """Rejected places first, with the places whose states are learnt with them, in the order of
        the text; or the run of places with the most rejected ones, the longest of those."""
        if self.keeps.remembers:
            return self._run()
        next_rejected = np.inf
        near = set()
        for each in reversed(self._rows):
            next_rejected = each.place if each.rejected else next_rejected
            if next_rejected - each.place <= self.keeps.depths:
                near.add(each.place)
        most = sorted(self._rows, key=lambda each: each.place not in near)[: self.keeps.most_rows]
        return sorted(most, key=lambda each: each.place)

    def _run(self) -> list[_HeardRow]:
        places = np.array([each.place for each in self._rows])
        rejected = np.cumsum([0, *(each.rejected for each in self._rows)])
        ends = np.arange(1, len(places) + 1)
        gaps = np.diff(places, prepend=places[0] - 1) != 1
        begins = np.maximum.accumulate(np.where(gaps, ends - 1, 0))  # of each place's run
        begins = np.maximum(begins, ends - self.keeps.most_rows)
        best = np.lexsort((ends - begins, rejected[ends] - rejected[begins]))[-1]
        return self._rows[begins[best] : ends[best]]

    @property
    def kept(self) -> KeptText | None:
        """What there is to keep; None for nothing."""
        if not self._rows:
            return None
        rows = self._chosen()
        ids = np.zeros((len(rows), TOP), np.uint32)
        weights = np.zeros((len(rows), TOP), np.uint16)
        for at, (_, row, _, _) in enumerate(rows):
            size = min(len(row.ids), TOP)
            ids[at, :size], weights[at, :size] = row.ids[:size], row.weights[:size]
        states = [each.state for each in rows if each.state is not None]
        return KeptText(
            np.array(self.token_ids, np.uint32),
            np.array([each.place for each in rows], np.int32),
            ids,
            weights,
            np.array([each.rejected for each in rows], np.bool_),
            np.array([each.row.mass for each in rows], np.uint16),
            states=np.stack(states) if states else None,
        )


def _is_finite(state: npt.NDArray[Any]) -> bool:
    """Of bfloat16 as int16, or float32."""
    if state.dtype == np.int16:
        return bool(((state & 0x7F80) != 0x7F80).all())  # an exponent of ones
    return bool(np.isfinite(state).all())


def packed(texts: Sequence[KeptText]) -> dict[str, npt.NDArray[Any]]:
    """Texts of one drafter as arrays."""
    states = [each.states for each in texts if each.states is not None]
    return {
        **({"states": np.concatenate(states)} if states else {}),
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
        np.split(arrays["states"], rows) if "states" in arrays else [None] * (len(tokens) + 1),
    ]
    return [KeptText(*each) for each in zip(*parts, strict=True)]
