"""What the recipes of all heads have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, cast

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, field_serializer

from tandem.drafting.decoders.branching import LARGEST_TREE, LargestTree
from tandem.drafting.decoders.shape import TreeShape, falls, likeliest_by_depth
from tandem.drafting.drafter import Checkpoint, Drafter, DraftSequence, Recipe, Setting, Traits
from tandem.engine.asks import Draw, Truncation
from tandem.engine.scorer import HeadScorer, Scorer
from tandem.errors import StartupError
from tandem.inference.feed import Feed
from tandem.shaping.text import ShapedRows
from tandem.speculation.feedback import FeedbackWanted
from tandem.speculation.tree import DraftShape

# Of a prompt: a message of 4 MiB holds as many of 4,096 numbers in three layers.
_PROMPT_TOKENS = 128
_MOST_PROMPT = 4096

# By depth and sibling rank.
AcceptanceByDepth = tuple[tuple[float, ...], ...]


_Ranks = Annotated[tuple[float, ...], Field(min_length=1, max_length=16)]


def _falling(value: AcceptanceByDepth) -> AcceptanceByDepth:
    if not all(map(falls, value)):
        raise ValueError("must be shares in (0, 1] that fall with the sibling's rank")
    return value


_Acceptance = Annotated[
    tuple[_Ranks, ...], Field(min_length=1, max_length=64), AfterValidator(_falling)
]
_ACCEPTANCE: TypeAdapter[AcceptanceByDepth] = TypeAdapter(_Acceptance)


@dataclass(eq=False)
class _Held:
    """What a sequence's cache holds: pairs of a feature and the token after it.

    Attributes:
        begins: position of the first feature.
        end: position after the last one.
    """

    begins: int = -1
    end: int = -1


class HeadDrafter(Drafter):
    """Drafts trees by a head.

    It drafts after the newest feature only. A head that remembers reads pairs: the feature of
    position i with the token i + 1. They are fed as soon as their features came; it knows nothing
    before the newest unbroken run of them.

    Args:
        head: gives rows.
        truncation: of them.
        acceptance: by depth and sibling rank, from which the shape follows; deeper levels are like
            the last one.
        largest_tree: most tokens of a draft.
        prompt_tokens: whose features a head that remembers them wants of a prompt.
        certain: whether the likeliest tokens are sent as certain ones, and none is drawn.
    """

    traits = Traits(shape=DraftShape.TREE)

    def __init__(
        self,
        head: HeadScorer,
        truncation: Truncation,
        acceptance: AcceptanceByDepth,
        largest_tree: int,
        *,
        prompt_tokens: int = 1,
        certain: bool = False,
    ) -> None:
        self._head, self._truncation, self._certain = head, truncation, certain
        deeper = acceptance[-1:] * (head.depths - len(acceptance))
        self._acceptance = (acceptance + deeper)[: head.depths]
        told = prompt_tokens if head.remembers else 1
        feedback = FeedbackWanted(
            head.reads, head.hidden_size, prompt_tokens=told, made_for=head.made_for
        )
        self.traits = replace(self.traits, largest_tree=largest_tree, feedback=feedback)

    def _news(self, sequence: DraftSequence, rows: int) -> Feed | None:
        """What came; None if the newest feature is not there yet."""
        tokens, end = sequence.token_ids, sequence.feedback.end
        if end != len(tokens) - 1:
            return None
        news = sequence.feedback.take()
        if not news:
            return None
        (cache,) = sequence.caches
        if self._head.remembers:
            if sequence.state is None:
                sequence.state = _Held()
            held: _Held = sequence.state
            if (begins := news[0].positions[0]) != held.end:  # after a gap
                held.begins = held.end = begins
            cache.rollback(held.end - held.begins)
            first, held.end = held.end, end
            features = [part.states for part in news]
        else:
            cache.rollback(0)
            first, features = end - 1, [news[-1].states[-1:]]
        known = [min(token, self._head.vocab_size - 1) for token in tokens[first + 1 :]]
        return Feed(cache, known, rows, features=features)

    def _shape(self, gamma: int, budget: int) -> TreeShape:
        """Of a draft; known before anything is drawn."""
        return _likeliest(self._acceptance[:gamma], min(budget, self.traits.largest_tree))

    def _draw(
        self,
        sequence: DraftSequence,
        feed: Feed,
        round_: int,
        node: int,
        nodes: int,
        counts: Sequence[int],
        rows: Sequence[int] | None = None,
        shaped: ShapedRows | None = None,
    ) -> Draw:
        """Siblings without replacement, see `Draw`; certain ones are the likeliest."""
        sampling = sequence.sampling
        return Draw(
            scorer=self._head,
            feed=feed,
            sampling=replace(sampling, temperature=0.0) if self._certain else sampling,
            truncation=self._truncation,
            vocab_size=sequence.vocab_size,
            numbers=sequence.numbers,
            round=round_,
            node=node,
            nodes=nodes,
            counts=counts,
            distinct=True,
            rows=rows,
            shaped=shaped,
            confident=sequence.threshold is not None,
        )


# Texts share their shapes, of which there is one a size.
@lru_cache(maxsize=4096)
def _likeliest(acceptance: AcceptanceByDepth, nodes: int) -> TreeShape:
    return likeliest_by_depth(acceptance, nodes)


class OfHead(Recipe):
    """A recipe with one head.

    Attributes:
        model: the head's folder; empty takes MODEL.
        target: the checkpoint that it is for; empty takes TARGET.
        acceptance: by depth and sibling rank; none takes the head's own.
        certain: send the likeliest tokens as certain ones.
        prompt_tokens: last ones of a prompt whose features are wanted.
        unmeasured: acceptance of a head that does not say its own.
    """

    unmeasured: ClassVar[AcceptanceByDepth]

    model: str = ""
    target: str = ""
    acceptance: _Acceptance | None = None
    certain: Annotated[
        bool, Setting("certain", "send the likeliest tokens as certain ones instead of drawing")
    ] = False
    prompt_tokens: Annotated[
        int,
        Field(ge=1, le=_MOST_PROMPT),
        Setting(
            "prompt_tokens",
            "number of last prompt tokens whose hidden states a head with a decoder layer reads",
        ),
    ] = _PROMPT_TOKENS
    max_nodes: LargestTree = LARGEST_TREE

    @field_serializer("model", "target")
    def _name(self, path: str) -> str:
        """Without its place on this machine: what is told to callers."""
        return Path(path).name

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """One."""
        return (Checkpoint(self.model, self.method, self.target),)

    @property
    def largest_tree(self) -> int:
        """As the key says."""
        return self.max_nodes

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> HeadDrafter:
        """See `Recipe`.

        Raises:
            StartupError: the head's files have no acceptances where they should.
        """
        head = cast("HeadScorer", scorers[0])
        acceptance = self.acceptance or self.unmeasured
        if self.acceptance is None and head.acceptance != ():
            try:
                acceptance = _ACCEPTANCE.validate_python(head.acceptance)
            except ValidationError:
                raise StartupError(
                    "the head's config.json: tandem.acceptance must hold, for each depth, shares in"
                    " (0, 1] that fall with the sibling's rank"
                ) from None
        kind = cast("type[HeadDrafter]", self.drafter)
        return kind(
            head,
            truncation,
            acceptance,
            self.max_nodes,
            prompt_tokens=self.prompt_tokens,
            certain=self.certain,
        )
