"""What one round emitted."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from orchestrator.text.contracts import Expected


class Origin(Enum):
    """Where a token came from."""

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True)
class EmittedToken:
    """A token.

    Attributes:
        id: in the target's vocabulary.
        origin: where it came from.
        text: that it released.
        siblings: that were drafted beside it.
    """

    id: int
    origin: Origin
    text: str
    siblings: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """The tokens of one round.

    Attributes:
        number: of the round.
        tokens: emitted.
        gamma: length of its draft, of a tree its longest path.
        nodes: tokens of its draft.
        expected: of it, where its size was chosen by that.
    """

    number: int
    tokens: list[EmittedToken]
    gamma: int
    nodes: int
    expected: Expected | None = None
