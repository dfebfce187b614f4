"""What every drafting method offers the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from tandem.errors import EngineFailure
from tandem.inference.cache import SequenceCache
from tandem.speculation.categorical import Categorical, words_of
from tandem.speculation.draft import Draft
from tandem.speculation.randomness import Draws, Lookahead, Purpose, integers
from tandem.speculation.sampling import Sampling


@dataclass(eq=False)
class DraftSequence:
    """One sequence as a drafter sees it.

    Attributes:
        token_ids: prompt and emitted tokens.
        sampling: shapes the drafter's distribution; its seed keys the draws.
        vocab_size: ids at or beyond it are never drafted.
        cache: its extent of the KV pool.
        state: the drafting method's own.
        bits: of a round, see `DraftRequest`.
    """

    token_ids: list[int]
    sampling: Sampling
    vocab_size: int
    cache: SequenceCache = field(init=False)
    state: Any = None
    bits: Lookahead[Sequence[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.bits = Lookahead(partial(_bits, self.sampling.seed))


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The next tokens of a prompt, to be taken in.

    Attributes:
        sequence: whose prompt it is.
        token_ids: they follow what was taken in before.
    """

    sequence: DraftSequence
    token_ids: Sequence[int]


@dataclass(eq=False)
class DraftRequest:
    """One draft in the making; it stays on the device until it is complete.

    Attributes:
        sequence: to draft for.
        round: keys the random numbers, with the sequence's seed.
        gamma: tokens wanted.
        tokens: [1] int64 each, drafted so far.
        rows: the distributions they were drawn from, of one row each.
    """

    sequence: DraftSequence
    round: int
    gamma: int
    tokens: list[Tensor] = field(default_factory=list)
    rows: list[Categorical] = field(default_factory=list)

    @cached_property
    def bits(self) -> Sequence[Tensor]:
        """[1, 2] each, the words of a 64-bit random integer for each of the gamma tokens."""
        return self.sequence.bits.take(self.round, self.gamma)

    @property
    def complete(self) -> bool:
        """Whether all wanted tokens are drafted."""
        return len(self.tokens) >= self.gamma

    def draft(self) -> Draft:
        """The finished draft, on the host.

        Raises:
            EngineFailure: a distribution was not finite.
        """
        rows = Categorical.cat(self.rows)
        tokens, weights = torch.cat(self.tokens).cpu().numpy(), rows.weights.cpu().numpy()
        if not weights.any(1).all():
            raise EngineFailure("the drafter computed a distribution that is not finite")
        return Draft.from_rows(tokens, rows.ids.cpu().numpy(), weights)


class Drafter(ABC):
    """A drafting method. Called by the engine thread only.

    Attributes:
        name: as GetModelInfo reports it.
    """

    name: ClassVar[str]

    @abstractmethod
    def open(self, sequence: DraftSequence) -> None:
        """Begin a sequence; its prompt follows in chunks."""

    @abstractmethod
    def extend(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """Move a sequence on by emitted tokens, forgetting what was drafted otherwise."""

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest], chunks: Sequence[PromptChunk]) -> None:
        """Draft one more token for each request, and take in pieces of prompts beside them.

        One step at a time, so that the engine may add, drop or cancel sequences between
        steps.
        """


def _bits(seed: int, round_: int, gamma: int) -> Sequence[Tensor]:
    return words_of(integers(Draws(seed, Purpose.DRAFT, round_, gamma))).chunk(gamma)
