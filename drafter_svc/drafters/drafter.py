"""What every drafting method offers the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tandem.speculation.categorical import Categorical
from tandem.speculation.draft import Draft
from tandem.speculation.sampling import Sampling


@dataclass(eq=False)
class DraftSequence:
    """One sequence as a drafter sees it.

    Attributes:
        token_ids: prompt and emitted tokens.
        sampling: shapes the drafter's distribution; its seed keys the draws.
        vocab_size: ids at or beyond it are never drafted.
        capacity: the most tokens that it may hold, drafts included.
        state: the drafting method's own (a model's KV cache, for instance).
    """

    token_ids: list[int]
    sampling: Sampling
    vocab_size: int
    capacity: int
    state: Any = None


@dataclass(eq=False)
class DraftRequest:
    """One draft in the making.

    Attributes:
        sequence: to draft for.
        gamma: tokens wanted.
        bits: a 64-bit random integer for each of them.
        token_ids: drafted so far.
        rows: the distributions they were drawn from.
    """

    sequence: DraftSequence
    gamma: int
    bits: Sequence[int]
    token_ids: list[int] = field(default_factory=list)
    rows: list[Categorical] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all wanted tokens are drafted."""
        return len(self.token_ids) >= self.gamma

    def draft(self) -> Draft:
        """The finished draft."""
        return Draft.from_rows(self.token_ids, self.rows)


class Drafter(ABC):
    """A drafting method. Called by the engine thread only.

    Attributes:
        name: as GetModelInfo reports it.
    """

    name: ClassVar[str]

    @abstractmethod
    def open(self, sequence: DraftSequence) -> None:
        """Take in a sequence's prompt."""

    @abstractmethod
    def extend(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """Move a sequence on by emitted tokens, forgetting what was drafted otherwise."""

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> None:
        """Draft one more token for each request.

        One step at a time, so that the engine may add, drop or cancel sequences between
        steps.
        """

    @abstractmethod
    def close(self, sequence: DraftSequence) -> None:
        """Free a sequence's state."""
