"""Drafts that a small decoder makes of the drafts of a cheaper method, by reviewing them.

Cascade Speculative Drafting (Chen et al., arXiv 2312.11462), vertical: the reviewer decides the
inner drafts as a target does, with a rule of its own. What it keeps and draws follows its own rows,
and these are what is sent; so the whole is exact at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import numpy as np
from pydantic import BaseModel, Field, field_validator, model_validator

from tandem.drafting.composed.parts import (
    assume,
    begin_part,
    data_of,
    draft_chain,
    settle,
    vocabulary_of,
)
from tandem.drafting.decoders.model import ModelDrafter, ModelRecipe, cache_of
from tandem.drafting.drafter import Checkpoint, DraftSequence, Recipe, Setting, Traits
from tandem.drafting.lookups.lookup import LookupRecipe
from tandem.drafting.part import PartDrafter
from tandem.engine.answers import ReviewAnswer
from tandem.engine.asks import Review, Steps, Truncation
from tandem.engine.scorer import Scorer
from tandem.inference.feed import Feed
from tandem.speculation.draft import Draft
from tandem.speculation.randomness import VerdictNumbers

if TYPE_CHECKING:
    import numpy.typing as npt

    Chain = Recipe  # any of those that draft chains, see `methods.py`
    Row = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]]

InnerRule = Literal["token", "block"]
# The key of the built-in recipes.
InnerRuleKey = Annotated[
    InnerRule, Setting("inner_rule", "rule by which inner drafts are reviewed")
]
# An inner round ends at the draft's greatest depth, or a draft where an inner round ends.
Cut = Literal["fixed", "round"]


@dataclass(eq=False)
class _Cascaded:
    """Of a sequence.

    Attributes:
        reviewer: the reviewer's own sequence; its state is the tokens that its cache holds.
        inner: the inner method's own sequence.
        numbers: of the verdicts on inner drafts.
    """

    reviewer: DraftSequence
    inner: DraftSequence
    numbers: VerdictNumbers


class CascadeDrafter(PartDrafter):
    """Asks an inner method for drafts and reviews them, until the draft is as deep as asked for.

    Args:
        reviewer: whose rows the draft has.
        inner: drafts chains.
        recipe: how inner drafts are made, decided and sent.
    """

    traits = Traits(pure=True)

    def __init__(
        self,
        reviewer: ModelDrafter,
        inner: PartDrafter,
        recipe: CascadeRecipe,
    ) -> None:
        self._reviewer, self._inner, self._recipe = reviewer, inner, recipe
        self.traits = Traits(
            # Its rows are the reviewer's, whatever was guessed before them.
            pure=recipe.cut == "fixed" and not recipe.certain and reviewer.traits.pure,
            vocabulary=vocabulary_of([inner]),
            data=data_of([inner]),
        )

    def open(self, sequence: DraftSequence) -> Steps[None]:
        """Take the prompt in, by the reviewer and the inner method."""
        first, *others = sequence.caches
        reviewer = yield from begin_part(self._reviewer, sequence, [first])
        inner = yield from begin_part(self._inner, sequence, others)
        numbers = VerdictNumbers.of(sequence.sampling.seed, sequence.part)
        sequence.state = _Cascaded(reviewer, inner, numbers)

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """Inner round by inner round; each gives a token or more."""
        own: _Cascaded = sequence.state
        gamma = min(gamma, budget)
        tokens: list[int] = []
        rows: list[Row] = []
        if not sequence.numbers.used:  # the round's first draft, of a part also
            for numbers in (own.inner.numbers, *own.numbers):
                numbers.used = 0
        # One call for the numbers of a round: it decides at most that number of inner tokens.
        own.numbers.accepting.take(round_, gamma * min(self._recipe.tokens, gamma))
        own.numbers.following.take(round_, gamma)
        while left := gamma - len(tokens):
            if self._recipe.cut == "round" and tokens and left <= self._recipe.tokens:
                break
            # A round that must not be cut has room for what follows its draft.
            most = min(self._recipe.tokens, left if self._recipe.cut == "fixed" else left - 1)
            guess = Draft.certain(())
            if most:
                guess = yield from draft_chain(self._inner, own.inner, round_, most)
                own.inner.numbers.used += most
            reviewed = yield from self._review(sequence, round_, tokens, guess, left)
            tokens += reviewed.token_ids
            rows += reviewed.rows
            assume(self._inner, own.inner, reviewed.token_ids, reviewed.kept)
        return Draft.certain(tokens) if self._recipe.certain else _sent(tokens, rows)

    def _review(
        self,
        sequence: DraftSequence,
        round_: int,
        tokens: Sequence[int],
        guess: Draft,
        left: int,
    ) -> Steps[ReviewAnswer]:
        """Have a guess decided after the tokens of the draft so far; the reviewer's cache holds
        what is kept."""
        own: _Cascaded = sequence.state
        reviewer = own.reviewer
        accepting = own.numbers.accepting.take(round_, len(guess))
        own.numbers.accepting.used += len(guess)
        following = own.numbers.following.take(round_, 1)
        own.numbers.following.used += 1
        held: list[int] = reviewer.state
        news = [*sequence.token_ids, *tokens][len(held) :]
        held += news
        # What fills the draft has nothing after it.
        fed = guess.token_ids[:-1] if len(guess) == left else guess.token_ids
        paths = [[*tokens, *guess.token_ids[:n]] for n in range(len(fed) + 1)]
        reviewed: ReviewAnswer = yield Review(
            scorer=self._reviewer.scorer,
            feed=Feed(cache_of(reviewer), self._reviewer.known([*news, *fed]), len(fed) + 1),
            guess=guess,
            rule=self._recipe.rule,
            sampling=sequence.sampling,
            truncation=self._reviewer.truncation,
            vocab_size=sequence.vocab_size,
            uniforms=np.concatenate([accepting, following]),
            leniency=self._recipe.leniency,
            shaped=sequence.shaped_rows(paths),
        )
        held += fed[: reviewed.kept]
        cache_of(reviewer).rollback(len(held))
        return reviewed

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Reviewer and inner method keep what they have computed of what came out."""
        own: _Cascaded = sequence.state
        self._reviewer.observe(own.reviewer, emitted)
        settle(self._inner, own.inner, emitted)
        sequence.token_ids.extend(emitted)

    def rewind(self, sequence: DraftSequence, length: int) -> None:
        """See `PartDrafter`."""
        if length < len(sequence.token_ids):
            own: _Cascaded = sequence.state
            self._reviewer.rewind(own.reviewer, length)
            self._inner.rewind(own.inner, length)
            own.inner.assumed = []
        super().rewind(sequence, length)


def _sent(tokens: list[int], rows: Sequence[Row]) -> Draft:
    """A chain with the reviewer's rows; those of one token are certain."""
    parts = [(ids[:0], weights[:0]) if len(ids) == 1 else (ids, weights) for ids, weights in rows]
    return Draft(
        tokens,
        [len(ids) for ids, _ in parts],
        np.concatenate([ids for ids, _ in parts]),
        np.concatenate([weights for _, weights in parts]),
    )


def must_review(reviewer: ModelRecipe) -> ModelRecipe:
    """Refuse a decoder that could not review.

    Raises:
        ValueError: it would end drafts by itself.
    """
    if reviewer.stop != "fixed":
        raise ValueError("stop must be fixed: a reviewer drafts nothing by itself")
    return reviewer


class _BuiltIn(BaseModel):
    """What the built-in cascade takes from the settings, beside those of its `lookup`."""

    rule: InnerRuleKey = "block"
    tokens: Annotated[
        int, Field(ge=1, le=64), Setting("inner_tokens", "tokens of an inner draft")
    ] = 4


class CascadeRecipe(Recipe):
    """The recipe of `cascade`: the recipes of its parts, and how they work together.

    Attributes:
        rule: by which inner drafts are decided.
        tokens: of an inner draft.
        cut: "fixed": the draft is as deep as asked for, the last inner round is cut; "round": it
            ends where another inner round might not fit.
        certain: all tokens are sent as certain ones, which may be chosen in any way.
        leniency: by which inner acceptance is multiplied; more than 1 only with `certain`.
    """

    drafts: ClassVar = "a chain of `MODEL`, which reviews what `lookup` guesses"
    drafter: ClassVar = CascadeDrafter

    method: Literal["cascade"] = "cascade"
    reviewer: ModelRecipe = ModelRecipe()
    inner: Chain = LookupRecipe()
    rule: InnerRule = "block"
    tokens: Annotated[int, Field(ge=1, le=64)] = 4
    cut: Cut = "fixed"
    certain: bool = False
    leniency: Annotated[float, Field(ge=1, le=1000)] = 1.0

    @model_validator(mode="after")
    def _fits(self) -> CascadeRecipe:
        if self.leniency > 1 and not self.certain:
            raise ValueError(
                "leniency needs certain = true: what is kept leniently does not follow the"
                " reviewer's rows"
            )
        return self

    @field_validator("reviewer")
    @classmethod
    def _reviews(cls, reviewer: ModelRecipe) -> ModelRecipe:
        return must_review(reviewer)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The reviewer's, then those of the inner method."""
        return (*self.reviewer.checkpoints, *self.inner.checkpoints)

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> CascadeDrafter:
        """See `Recipe`."""
        return CascadeDrafter(
            self.reviewer.make(scorers[:1], truncation),
            cast("PartDrafter", self.inner.make(scorers[1:], truncation)),
            self,
        )

    @classmethod
    def built_in_keys(cls) -> type[BaseModel]:
        """See `Recipe`."""
        return _BuiltIn

    @classmethod
    def built_in(cls, **keys: Any) -> Recipe:
        """See `Recipe`."""
        own = _BuiltIn(**keys)
        return cls(rule=own.rule, tokens=own.tokens)
