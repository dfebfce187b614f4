"""What a target tells a drafter of its passes: hidden states, and likely tokens at its places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# Likeliest tokens at a place.
MOST_PREDICTED = 256
# The whole mass of a distribution, and bytes of a row's mass as it is sent.
WHOLE_MASS, MASS_BYTES = 65535, 3
# Most layers whose states a target gives. Published heads read fewer, and the states of four at one
# position are as large as the logits of a small model.
MOST_LAYERS = 4


class HiddenDtype(Enum):
    """A dtype in which hidden states leave the device, and travel."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"

    @property
    def bytes(self) -> int:
        """Of a number."""
        return 2 if self is HiddenDtype.BFLOAT16 else 4


@dataclass(frozen=True)
class FeedbackWanted:
    """What a drafter wants to be told, and what its drafts need of the target beside that.

    Attributes:
        layers: whose hidden states, numbered as `FeedbackSpec` in common.proto; () for none.
        hidden_size: numbers of a state.
        dtype: in which states are sent.
        prompt_tokens: how many of the prompt's last positions have their states told.
        top: likeliest tokens at each place, 1..256; with 1 no weights come with them, with 0 no
            predictions.
        everywhere: predictions of all places, and not only of those that are kept.
        probes: most probes of a draft.
        probe_tokens: extra embeddings of the target that the probes name.
        made_for: weights fingerprint of the target that the drafter was trained for; empty for any.
        later: the wish as it came, where a later version's drafter wants what this one does not
            know; else empty.
        columns: filled in by a target: where each of `layers` is among those that it gives.
        on_device: the target's own drafter wants it, and states stay on the device; else they come
            to the host with the verdict, and are sent.
    """

    layers: tuple[int, ...] = ()
    hidden_size: int = 0
    dtype: HiddenDtype = HiddenDtype.BFLOAT16
    prompt_tokens: int = 1
    top: int = 0
    everywhere: bool = False
    probes: int = 0
    probe_tokens: int = 0
    made_for: str = ""
    later: bytes = b""
    columns: tuple[int, ...] = ()
    on_device: bool = False

    @property
    def told(self) -> bool:
        """Whether anything is to be told."""
        return bool(self.layers or self.top)

    @property
    def asks(self) -> bool:
        """Whether a drafter asks for anything, also of a kind that a later version knows."""
        return self.told or bool(self.later)

    @property
    def said(self) -> FeedbackWanted:
        """The part that must be the same for all drafters of a text that ask: its target is told
        it once, in `open`."""
        return replace(self, hidden_size=0, probes=0, probe_tokens=0, made_for="")

    @property
    def state_bytes(self) -> int:
        """Of the states of a position, as they are sent."""
        return len(self.layers) * self.hidden_size * self.dtype.bytes

    @property
    def predicted_bytes(self) -> int:
        """Of the predictions of a place, as they are sent."""
        return 4 if self.top == 1 else 6 * self.top + MASS_BYTES

    def has_states_of(self, other: FeedbackWanted) -> bool:
        """Whether its states do for another wish of the same target."""
        return (self.columns, self.dtype) == (other.columns, other.dtype)

    @property
    def at_open(self) -> FeedbackWanted:
        """What is told of the prompt: no predictions."""
        return replace(self, top=0)

    def of(self, given: Sequence[int], *, on_device: bool = False) -> FeedbackWanted:
        """The same wish of a target that gives the layers `given`; all that are wanted are among
        them."""
        columns = tuple(given.index(layer) for layer in self.layers)
        return replace(self, columns=columns, on_device=on_device)


NO_FEEDBACK = FeedbackWanted()


class Row(NamedTuple):
    """A distribution with integer weights, the likeliest token first.

    Attributes:
        ids: [K] uint32.
        weights: [K] uint16, none of them 0.
        mass: probability of these tokens together, of `WHOLE_MASS`; 0 where it is not known.
    """

    ids: npt.NDArray[np.uint32]
    weights: npt.NDArray[np.uint16]
    mass: int = 0


Predicted = Mapping[int, Row]


@dataclass(frozen=True, eq=False)
class Feedback:
    """What a target tells of one pass.

    Attributes:
        round: whose pass it was.
        positions: of the states, ascending: indices in the text, from 0.
        states: [positions, layers, width], bfloat16 as int16: an array, or a tensor on the device
            where the target drafts by itself; None where none are wanted.
        predicted: by place of the round's draft, ascending, see `Draft`; the places of probes are
            after those of candidates. Rows of one token where no more are wanted. None where no
            predictions are wanted, or they are of no use.
    """

    round: int
    positions: Sequence[int] = ()
    states: Any = None
    predicted: Predicted | None = None

    @property
    def tells(self) -> bool:
        """Whether anything is told."""
        return self.states is not None or self.predicted is not None

    @property
    def lasting(self) -> Feedback:
        """What is of use after the next round too."""
        return self if self.predicted is None else replace(self, predicted=None)


def united(wishes: Sequence[FeedbackWanted]) -> FeedbackWanted:
    """What a text says for all of its drafters, and the most that a draft of any needs of a target.

    Args:
        wishes: of these, equal as `said` where they ask for anything.
    """
    first = next((wanted for wanted in wishes if wanted.asks), NO_FEEDBACK)
    return replace(
        first,
        probes=max((wanted.probes for wanted in wishes), default=0),
        probe_tokens=max((wanted.probe_tokens for wanted in wishes), default=0),
    )


class FeedbackGiven(NamedTuple):
    """What a target can tell, and compute beside a draft.

    Attributes:
        name: the target, in sentences.
        weights_fingerprint: see `Model`.
        hidden_size: numbers of a state.
        layers: whose hidden states it gives.
        probe_tokens: its extra embeddings.
        max_nodes: candidates and probes of a draft together; 0 for chains alone, without probes.
        message_bytes: that states of a prompt may take; None where they are not sent.
        last: number of the layer after the final norm; None where that is not known.
    """

    name: str
    weights_fingerprint: str
    hidden_size: int
    layers: Sequence[int]
    probe_tokens: int
    max_nodes: int
    message_bytes: int | None = None
    last: int | None = None


def misfit(wanted: FeedbackWanted, given: FeedbackGiven) -> str:
    """Why a drafter does not go with a target, as a sentence after the drafter's name; empty where
    it does."""
    name = given.name
    if wanted.made_for not in ("", given.weights_fingerprint):
        return (
            f"was made for a target with the weights {wanted.made_for[:12]}, and {name} has"
            f" {given.weights_fingerprint[:12]}: take the head of this target"
        )
    if wanted.probe_tokens > given.probe_tokens:
        return (
            f"has probes that name {wanted.probe_tokens} extra embeddings, and {name} has"
            f" {given.probe_tokens}: set the target's EXTRA_EMBEDDINGS to the folder of rows that"
            " were trained for it, or lower the drafter's MASKS"
        )
    if wanted.probes and wanted.probes >= given.max_nodes:
        return (
            f"sends up to {wanted.probes} probes with a draft, and {name} takes"
            f" {given.max_nodes} tokens in all: raise its MAX_NODES"
        )
    if wanted.top > MOST_PREDICTED:
        return f"reads the {wanted.top} likeliest tokens, and targets tell {MOST_PREDICTED}"
    return _misfit_of_states(wanted, given) if wanted.layers else ""


def _misfit_of_states(wanted: FeedbackWanted, given: FeedbackGiven) -> str:
    if wanted.hidden_size != given.hidden_size:
        return (
            f"reads hidden states of {wanted.hidden_size} numbers, and {given.name} has"
            f" {given.hidden_size}: take a head of this target"
        )
    if lacking := sorted(set(wanted.layers) - set(given.layers)):
        own = ",".join(map(str, given.layers)) or "none"
        named = ",".join("last" if n == given.last else str(n) for n in wanted.layers)
        return (
            f"reads hidden states of layer {lacking[0]}, and {given.name} gives {own}: set the"
            f" target's FEEDBACK to {named}"
        )
    each, room = wanted.state_bytes, given.message_bytes
    if room is not None and max(wanted.prompt_tokens, 1) * each > room:
        return (
            f"reads hidden states of {wanted.prompt_tokens} prompt tokens, {each} bytes each, and"
            " they do not fit into a message: raise MAX_MESSAGE_MIB of both services"
        )
    return ""
