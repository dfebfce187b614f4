"""What every drafting method offers the engine that runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tandem.engine.asks import Steps
from tandem.speculation.draft import Draft
from tandem.speculation.nodes import DraftShape
from tandem.speculation.randomness import Foreseen, Purpose, digits
from tandem.speculation.sampling import Sampling


@dataclass(eq=False)
class DraftSequence:
    """One sequence as a drafter sees it.

    Attributes:
        token_ids: prompt and emitted tokens.
        sampling: shapes the drafter's distribution; its seed keys the draws.
        vocab_size: ids at or beyond it are never drafted.
        nodes: positions that it needs beyond its text, for nodes that are not kept.
        caches: its extent of each of the drafter's pools.
        state: the drafting method's own.
        numbers: for its draws.
    """

    token_ids: list[int]
    sampling: Sampling
    vocab_size: int
    nodes: int = 0
    caches: list[Any] = field(default_factory=list)
    state: Any = None
    numbers: Foreseen = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = Foreseen(self.sampling.seed, Purpose.DRAFT, digits)


class Drafter(ABC):
    """A drafting method. Called by the engine thread only.

    The contract of a draft (common.proto, `Draft`) is what makes a method exact: decide, then
    draw, then send; never withdraw, sort or choose among drawn tokens.

    Attributes:
        name: as GetModelInfo reports it.
        shape: of its drafts.
        pure: whether each row is a function of the tokens before it alone.
        max_nodes: the most that it draws a round; 0 where its drafts are chains.
    """

    name: ClassVar[str]
    shape: ClassVar[DraftShape] = DraftShape.CHAIN
    pure: ClassVar[bool] = False
    max_nodes: int = 0

    def open(self, sequence: DraftSequence) -> Steps[None]:
        """Take the prompt in."""
        yield from ()

    def go_on(
        self,
        sequence: DraftSequence,
        round_: int,
        emitted: Sequence[int],
        gamma: int,
        max_nodes: int = 0,
    ) -> Steps[Draft]:
        """Observe what was emitted since the last draft, then draft behind it."""
        self.observe(sequence, emitted)
        return (yield from self.draft(sequence, round_, gamma, max_nodes))

    @abstractmethod
    def draft(
        self, sequence: DraftSequence, round_: int, gamma: int, max_nodes: int = 0
    ) -> Steps[Draft]:
        """Draft behind what was emitted, at most `gamma` deep; nothing if it likes.

        The draft depends on the sequence, its seed and the round alone.

        Args:
            sequence: that it continues.
            round_: keys the numbers.
            gamma: tokens of the longest path.
            max_nodes: tokens in all; 0 for as many as `gamma`.
        """

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Move a sequence on by emitted tokens, forgetting what was drafted otherwise."""
        sequence.token_ids.extend(emitted)
