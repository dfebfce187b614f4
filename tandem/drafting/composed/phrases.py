"""Ouroboros (Zhao et al., arXiv 2402.13720): a small decoder drafts with a pool of phrases before
and after it.

Before it, phrases guess what it drafts, and it reviews several guessed tokens in one pass, as in a
cascade. After it, phrases that begin with the draft's last token are alternative ends of the
draft, of certain tokens. What the target predicts along a draft makes phrases for later rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from tandem.drafting.composed.cascade import (
    CascadeDrafter,
    CascadeRecipe,
    InnerRuleKey,
    must_review,
)
from tandem.drafting.decoders.branching import LARGEST_TREE, LargestTree
from tandem.drafting.decoders.model import ModelDrafter, ModelRecipe
from tandem.drafting.drafter import Checkpoint, DraftSequence, Recipe, Setting, Traits
from tandem.drafting.part import PartDrafter
from tandem.engine.asks import Steps, Truncation
from tandem.engine.scorer import Scorer
from tandem.retrieval.merged import MergedTree
from tandem.retrieval.ngrams import NgramPool
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import FeedbackWanted
from tandem.speculation.tree import DraftShape

# The last tokens of a prompt that are taken in, as in `lookahead`.
_TEXT = 4096
# Phrases with the same first token, from which guesses are chosen by more last tokens than one.
_EACH = 16
# Scopes whose phrases are kept: of more, those are forgotten that were used least lately.
_SCOPES = 16
# Texts of which a kept pool has phrases. After them the scope's phrases are forgotten.
_SEEDS = 4096
# A draft's depth over the greatest depth of suffixes: tokens of the reviewer are kept more often.
_SHARE = 3
# Nodes of a tree of guesses, of which one path is reviewed.
_GUESSES = 16


@dataclass
class _Known:
    """The phrases of a sequence.

    Attributes:
        pool: where they are; several sequences may have it.
        known: tokens of the text that the pool has.
        draft: the last one, until it is known what came of it.
    """

    pool: NgramPool
    known: int
    draft: Draft | None = None

    def learn(self, text: Sequence[int], predicted: Mapping[int, int]) -> None:
        """Take in what the target predicted along the last draft, and what was emitted.

        A phrase is made of the predictions at places that follow each other, after the token of
        the first one. So after a suffix comes what the target would have it be.

        Args:
            text: with what was emitted.
            predicted: the target's likeliest token at each place of that draft, if they came.
        """
        draft, self.draft = self.draft, None
        if draft is not None:
            tokens = [text[self.known - 1], *draft.token_ids]
            for place in range(len(tokens)):
                last = [0, *draft.path_to(place)][1 - self.pool.length :]
                if len(last) == self.pool.length - 1 and all(at in predicted for at in last):
                    self.pool.add([tokens[last[0]], *(predicted[at] for at in last)])
        self.pool.add_text(text, self.known)
        self.known = len(text)


@dataclass
class _Kept:
    """The phrases of a scope.

    A phrase shows what its text drew, and a text of the same seed draws with the same random
    numbers. So it has no phrase of that one: its law would not be the target's.

    Attributes:
        pool: where they are.
        seeds: of the texts that they may be of.
    """

    pool: NgramPool
    seeds: set[int] = field(default_factory=set)


class PhraseGuesser(PartDrafter):
    """Guesses how a text goes on by phrases; certain tokens. A sequence's state is its phrases.

    Args:
        length: tokens of a phrase.
        most: phrases of a pool.
        kept: whether the texts of a scope share a pool, which outlives them.
    """

    traits = Traits(shape=DraftShape.TREE)

    def __init__(self, length: int, most: int, *, kept: bool) -> None:
        self._length, self._most, self._kept = length, most, kept
        self._scopes: dict[str, _Kept] = {}

    def open(self, sequence: DraftSequence) -> Steps[None]:
        """Begin with the phrases that earlier texts of the scope left, if they are kept."""
        yield from ()
        known = max(len(sequence.token_ids) - _TEXT, 0)
        sequence.state = _Known(self._pool(sequence.salt, sequence.sampling.seed), known)

    def _pool(self, salt: str | None, seed: int) -> NgramPool:
        """Of a scope; of the text alone without one, or where the scope had a text of its seed."""
        fresh = NgramPool(self._length, _EACH, self._most)
        if not self._kept or salt is None:
            return fresh
        own = self._scopes.pop(salt, None)
        if own is None or len(own.seeds) >= _SEEDS:
            own = _Kept(fresh)
        self._scopes[salt] = own  # the last one now
        if len(self._scopes) > _SCOPES:
            del self._scopes[next(iter(self._scopes))]
        if seed in own.seeds:
            return NgramPool(self._length, _EACH, self._most)
        own.seeds.add(seed)
        return own.pool

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """What phrases say; nothing where none has the last token."""
        yield from ()
        tree = MergedTree(_GUESSES, sequence.vocab_size)
        tree.fill(sequence.state.pool.continuations(sequence.token_ids, gamma))
        return Draft.certain(tree.token_ids, tree.parents)


class PhrasesDrafter(CascadeDrafter):
    """Reviews phrases, and sends others after what came of it.

    It is not pure: its suffixes depend on all that was drafted and rejected before. What the
    reviewer keeps and draws has the reviewer's own rows, and suffixes are certain, so neither
    depends on what a phrase was made of.

    Args:
        reviewer: whose rows the draft has.
        recipe: how phrases are used.
    """

    traits = Traits(shape=DraftShape.TREE)

    def __init__(self, reviewer: ModelDrafter, recipe: PhrasesRecipe) -> None:
        guesser = PhraseGuesser(recipe.ngram, recipe.pool, kept=recipe.kept)
        tokens = recipe.ngram - 1
        super().__init__(reviewer, guesser, CascadeRecipe(rule=recipe.rule, tokens=tokens))
        self.traits = Traits(
            shape=DraftShape.TREE,
            largest_tree=recipe.max_nodes,
            feedback=FeedbackWanted(top=1, everywhere=True),
        )
        self._length, self._suffixes = tokens, recipe.suffixes

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """A chain of the reviewer's; after its end suffixes of at most a third of the depth."""
        nodes = min(budget, self.traits.largest_tree)
        depth = min(self._length, gamma // _SHARE) if self._suffixes else 0
        chain = yield from super().draft(sequence, round_, min(gamma - depth, nodes), nodes)
        own: _Known = sequence.state.inner.state
        own.draft = chain
        if depth:
            suffixes = MergedTree(nodes - len(chain), sequence.vocab_size)
            suffixes.fill(own.pool.behind(chain.token_ids[-1], depth, self._suffixes))
            own.draft = _behind(chain, suffixes)
        return own.draft

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Learn phrases, for the rounds to come."""
        super().observe(sequence, emitted)
        own: _Known = sequence.state.inner.state
        own.learn(sequence.token_ids, sequence.feedback.likeliest())


def _behind(chain: Draft, suffixes: MergedTree) -> Draft:
    """A chain, and certain tokens after its end."""
    parents = [*range(len(chain)), *(len(chain) + parent for parent in suffixes.parents)]
    return replace(
        chain,
        token_ids=[*chain.token_ids, *suffixes.token_ids],
        sizes=[*chain.sizes, *[0] * len(suffixes.token_ids)],
        parents=None if parents == list(range(len(parents))) else parents,
    )


class PhrasesRecipe(Recipe):
    """The recipe of `phrases`.

    Attributes:
        rule: by which guesses of the reviewer's own tokens are decided.
    """

    drafts: ClassVar = "a chain of `MODEL`, which reviews phrases, and phrases after its end"
    drafter: ClassVar = PhrasesDrafter

    method: Literal["phrases"] = "phrases"
    reviewer: ModelRecipe = ModelRecipe()
    rule: InnerRuleKey = "block"
    ngram: Annotated[
        int, Field(ge=2, le=16), Setting("phrases_ngram", "tokens of a phrase, its first included")
    ] = 5
    suffixes: Annotated[
        int,
        Field(ge=0, le=64),
        Setting(
            "phrases_suffixes",
            "most phrases to send after the end of MODEL's draft; they take at most a third of"
            " the depth that is asked for. 0 sends none",
        ),
    ] = 4
    kept: Annotated[
        bool,
        Setting(
            "phrases_kept",
            "whether phrases outlive their text, for others with the same cache_salt (of the same"
            " caller, see CACHE_SCOPE); needs PREFIX_CACHE",
        ),
    ] = False
    pool: Annotated[
        int,
        Field(ge=1, le=1 << 20),
        Setting(
            "phrases_pool",
            "most phrases of a text; with PHRASES_KEPT of a scope, of which there are at most 16",
        ),
    ] = 16_384
    max_nodes: LargestTree = LARGEST_TREE

    @field_validator("reviewer")
    @classmethod
    def _reviews(cls, reviewer: ModelRecipe) -> ModelRecipe:
        return must_review(reviewer)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The reviewer's."""
        return self.reviewer.checkpoints

    @property
    def largest_tree(self) -> int:
        """As the key says."""
        return self.max_nodes

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> PhrasesDrafter:
        """See `Recipe`."""
        return PhrasesDrafter(self.reviewer.make(scorers, truncation), self)
