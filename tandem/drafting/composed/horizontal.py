"""Chains whose first tokens one method drafts, and later ones the next.

Cascade Speculative Drafting (Chen et al., arXiv 2312.11462), horizontal: later tokens are kept less
often, so cheaper methods may guess them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import BaseModel, Field, model_validator

from tandem.drafting.composed.parts import (
    assume,
    begin_part,
    data_of,
    draft_chain,
    settle,
    vocabulary_of,
)
from tandem.drafting.decoders.model import ModelRecipe
from tandem.drafting.drafter import Checkpoint, Drafter, DraftSequence, Recipe, Setting, Traits
from tandem.drafting.lookups.lookup import LookupRecipe
from tandem.drafting.part import PartDrafter
from tandem.engine.asks import Steps, Truncation
from tandem.engine.scorer import Scorer
from tandem.speculation.draft import Draft

if TYPE_CHECKING:
    Chain = Recipe  # any of those that draft chains, see `methods.py`

MOST_PARTS = 4


class HorizontalDrafter(PartDrafter):
    """Each part goes on after what the parts before it drafted; a sequence's state is the parts'
    own sequences.

    Args:
        parts: draft chains.
        tokens: of each part but the last, which drafts the rest.
        caches: of each part.
    """

    def __init__(
        self, parts: Sequence[PartDrafter], tokens: Sequence[int], caches: Sequence[int]
    ) -> None:
        self._parts, self._tokens, self._caches = tuple(parts), tuple(tokens), tuple(caches)
        self.traits = Traits(vocabulary=vocabulary_of(parts), data=data_of(parts))

    def open(self, sequence: DraftSequence) -> Steps[None]:
        """Take the prompt in, part by part."""
        sequence.state, first = [], 0
        for part, count in zip(self._parts, self._caches, strict=True):
            own = yield from begin_part(part, sequence, sequence.caches[first : first + count])
            sequence.state.append(own)
            first += count

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """Part by part; a part that has no more to say leaves its place to the next."""
        gamma = min(gamma, budget)
        drafts: list[Draft] = []
        left = gamma
        owns: list[DraftSequence] = sequence.state
        if not sequence.numbers.used:  # the round's first draft, of a part also
            for own in owns:
                own.numbers.used = 0
        for place, (part, most) in enumerate(zip(self._parts, (*self._tokens, gamma), strict=True)):
            if not left:
                break
            most = min(most, left)
            draft = yield from draft_chain(part, owns[place], round_, most)
            owns[place].numbers.used += most
            drafts.append(draft)
            left -= len(draft)
            for behind in range(place + 1, len(owns)):
                if len(draft):
                    assume(self._parts[behind], owns[behind], draft.token_ids)
        return _joined(drafts)

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Each part keeps what it has computed of what came out."""
        for part, own in zip(self._parts, sequence.state, strict=True):
            settle(part, own, emitted)
        sequence.token_ids.extend(emitted)

    def rewind(self, sequence: DraftSequence, length: int) -> None:
        """See `PartDrafter`."""
        if length < len(sequence.token_ids):
            for part, own in zip(self._parts, sequence.state, strict=True):
                part.rewind(own, length)
                own.assumed = []
        super().rewind(sequence, length)


def _joined(drafts: Sequence[Draft]) -> Draft:
    """Chains after each other."""
    return Draft(
        [token_id for draft in drafts for token_id in draft.token_ids],
        [size for draft in drafts for size in draft.sizes],
        np.concatenate([draft.ids for draft in drafts]),
        np.concatenate([draft.weights for draft in drafts]),
    )


class _BuiltIn(BaseModel):
    """What the built-in recipe takes from the settings."""

    first_tokens: Annotated[
        int, Field(ge=1, le=64), Setting("first_tokens", "tokens that MODEL drafts before lookup")
    ] = 2


class HorizontalRecipe(Recipe):
    """The recipe of `horizontal`: the recipes of its parts."""

    drafts: ClassVar = "a chain whose first tokens `MODEL` drafts, and `lookup` the rest"
    drafter: ClassVar = HorizontalDrafter

    method: Literal["horizontal"] = "horizontal"
    parts: Annotated[tuple[Chain, ...], Field(min_length=2, max_length=MOST_PARTS)]
    tokens: Annotated[
        tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(min_length=1, max_length=MOST_PARTS)
    ]

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Part by part."""
        return tuple(checkpoint for part in self.parts for checkpoint in part.checkpoints)

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> Drafter:
        """See `Recipe`."""
        caches = [len(part.checkpoints) for part in self.parts]
        firsts = [sum(caches[:place]) for place in range(len(caches))]
        parts = [
            cast("PartDrafter", part.make(scorers[first : first + count], truncation))
            for part, first, count in zip(self.parts, firsts, caches, strict=True)
        ]
        return HorizontalDrafter(parts, self.tokens, caches)

    @model_validator(mode="after")
    def _fits(self) -> HorizontalRecipe:
        if len(self.tokens) != len(self.parts) - 1:
            raise ValueError(
                f"tokens must have {len(self.parts) - 1} numbers: one for each part but the last,"
                " which drafts the rest"
            )
        return self

    @classmethod
    def built_in_keys(cls) -> type[BaseModel]:
        """See `Recipe`."""
        return _BuiltIn

    @classmethod
    def built_in(cls, **keys: Any) -> Recipe:
        """See `Recipe`."""
        own = _BuiltIn(**keys)
        return cls(parts=(ModelRecipe(), LookupRecipe()), tokens=(own.first_tokens,))
