"""What every drafting method is made of: a recipe with its keys, and a drafter that it makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from tandem.drafting.known_feedback import KnownFeedback
from tandem.drafting.stop import Threshold
from tandem.engine.asks import Steps, Truncation
from tandem.engine.scorer import Scorer
from tandem.inference.kv.sparse_keys import SparseKeys
from tandem.shaping.text import ShapedRows, ShapedText
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import NO_FEEDBACK, Feedback, FeedbackWanted
from tandem.speculation.randomness import Purpose, RandomNumbers, digits
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftShape, DraftSize


@dataclass(eq=False)
class DraftSequence:
    """One sequence as a drafter sees it.

    Attributes:
        token_ids: prompt and emitted tokens; never empty.
        sampling: shapes the drafter's distribution; its seed keys the draws.
        vocab_size: of the target. No id at or beyond it may be drafted; `token_ids` has none.
        nodes: positions that it needs beyond its text, for nodes that are not kept.
        caches: its extent of each of the drafter's pools.
        state: the drafting method's own.
        feedback: what is known of the target's passes, as far as the method wants it.
        shaped: what the request does to the logits, at the end of all that was emitted; None for
            nothing. Its holder moves it on. At a drafter it is for the acceptance's sake:
            drafts are exact without it.
        threshold: below which a drafted token ends a draft, where the method has one.
        salt: of the texts with which it shares its computed prefix; None shares nothing.
        assumed: last ones of `token_ids` that are not emitted yet, where another method drafted
            them and this one goes on after them.
        within: the sequence of the whole that its method is a part of.
        part: its method's number in the recipe, which keys random numbers: 1 is the whole, whose
            parts follow in the order in which they are opened, each before its own parts.
        parts: numbers that are taken, of the whole.
        numbers: for its draws.
    """

    token_ids: list[int]
    sampling: Sampling
    vocab_size: int
    nodes: int = 0
    caches: list[Any] = field(default_factory=list)
    state: Any = None
    feedback: KnownFeedback = field(default_factory=KnownFeedback)
    shaped: ShapedText | None = None
    threshold: Threshold | None = None
    salt: str | None = None
    assumed: list[int] = field(default_factory=list)
    within: DraftSequence | None = None
    part: int = 1
    parts: int = 1
    numbers: RandomNumbers = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = RandomNumbers(self.sampling.seed, Purpose.DRAFT, digits)

    def shaped_rows(self, paths: Sequence[Sequence[int] | None]) -> ShapedRows | None:
        """What applies behind the text and drafted tokens, see `ShapedText.rows`."""
        if self.shaped is None:
            return None
        assumed = self.all_assumed()
        return self.shaped.rows([None if path is None else [*assumed, *path] for path in paths])

    def all_assumed(self) -> list[int]:
        """Last ones of `token_ids` that are not emitted yet, whichever of the wholes assumed
        them."""
        before = [] if self.within is None else self.within.all_assumed()
        return [*before, *self.assumed]


class DraftedVocabulary(NamedTuple):
    """Whose ids a method drafts that has no model.

    Attributes:
        tokenizer: fingerprint of the vocabulary; empty for any.
        size: number of its ids.
    """

    tokenizer: str = ""
    size: int = 0


ANY_VOCABULARY = DraftedVocabulary()


@dataclass(frozen=True)
class Traits:
    """What a drafter says of itself before it drafts.

    A class has those of all drafters that are made of it; what a recipe determines, each has of its
    own. `prepares` is read of the class, before a model is loaded.

    Attributes:
        shape: of its drafts.
        pure: promises two things of every draft, which docs/recipes.md shows by examples: after
            the same tokens stands the same row, wherever the round began; and the draft has all
            the tokens that it was asked for. A rule that `needs_every_draft` relies on both. The
            tests hold a method to it (docs/testing.md).
        largest_tree: most tokens of a tree that it drafts; 0 where it drafts chains.
        feedback: what it wants to be told by a target that suits it. Of hidden states there may be
            gaps, and none may have come yet: then it drafts nothing. Predictions may not have come:
            then it drafts what it can without them.
        vocabulary: whose ids it drafts; any, where its models do not say it.
        data: fingerprint of what it drafts from beside its recipe and its models.
        prepares: whether its drafts can be prepared ahead (`tandem.drafting.ahead`); not where the
            method needs news of the target, or no time.
        looks: the model whose rows say what may follow a draft, which has the first of a sequence's
            caches. A class has none, nor has a method whose drafts are not prepared.
    """

    shape: DraftShape = DraftShape.CHAIN
    pure: bool = False
    largest_tree: int = 0
    feedback: FeedbackWanted = NO_FEEDBACK
    vocabulary: DraftedVocabulary = ANY_VOCABULARY
    data: str = ""
    prepares: bool = False
    looks: Scorer | None = None


class Drafter(ABC):
    """Drafts by one method. Called by the engine thread only.

    The contract of a draft (common.proto, `Draft`) is what makes a method exact: decide, then
    draw, then send; never withdraw, sort or choose among drawn tokens. A token that was not drawn
    may be chosen in any way, if its row is certain: all on that token.

    Attributes:
        traits: what it says of itself.
    """

    traits: Traits = Traits()

    def open(self, sequence: DraftSequence) -> Steps[None]:
        """Take the prompt in."""
        yield from ()

    @abstractmethod
    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """Draft after what was emitted; see docs/recipes.md for what a draft may be.

        The draft depends on nothing but the sequence, its seed, the round and the size asked for. A
        chain has at most min(gamma, budget) tokens: exactly as many where the method is `pure`,
        else fewer or none if the method has no more to say. To bring a chain to the host (`ToHost`)
        is a method's last ask, and the answer its result: it may be decided before it is brought.

        Args:
            sequence: that it continues.
            round_: number of the round, which keys the random numbers of its draws.
            gamma: most tokens of the longest path, at least 1.
            budget: most tokens of all paths together, at least 1; probes are not counted.
        """

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Move a sequence on by emitted tokens, forgetting what was drafted otherwise."""
        sequence.token_ids.extend(emitted)


def go_on(
    drafter: Drafter,
    sequence: DraftSequence,
    round_: int,
    emitted: Sequence[int],
    size: DraftSize,
    feedback: Sequence[Feedback] = (),
) -> Steps[Draft]:
    """Have a drafter observe what was emitted since the last draft, then draft after it.

    Args:
        drafter: of the sequence.
        sequence: that it continues.
        round_: number of the round.
        emitted: token ids, at least one.
        size: of the draft.
        feedback: that came since the last draft, in the order of its rounds. Predictions are of a
            round's own draft: of a round without one, as a target's own drafter may hear, they are
            of its single place, 0.
    """
    sequence.feedback.hear(feedback)
    drafter.observe(sequence, emitted)
    return (yield from drafter.draft(sequence, round_, size.gamma, size.nodes or size.gamma))


@dataclass(frozen=True)
class Setting:
    """Marks a key of a recipe that is a setting of the drafter service too.

    Attributes:
        name: of the setting, without TANDEM_DRAFTER_, in lower case.
        description: of key and setting. The names of the methods that have it go before it.
    """

    name: str
    description: str


# The checkpoint of a target that drafts with a part of itself, or over few keys.
OF_TARGET = "@target"


class Checkpoint(NamedTuple):
    """Where a scorer comes from.

    Attributes:
        path: directory or hub id; "" is MODEL's, and `OF_TARGET` the target itself.
        head: its family, if it is a head, such as "medusa"; "" for a decoder.
        target: of a head: its target's checkpoint; "" is TARGET's.
        adapter: of a decoder: folder of a low-rank adapter; "" for none.
        exit: of a decoder: its first layers, which alone are computed; 0 for all.
        skip: of a decoder: file with the sublayers to leave out; "" for none.
        keys: of a text, that it sees; None for all.
    """

    path: str = ""
    head: str = ""
    target: str = ""
    adapter: str = ""
    exit: int = 0
    skip: str = ""
    keys: SparseKeys | None = None


class Recipe(BaseModel, ABC):
    """What a drafter of one method is made of: the method's name, and its keys.

    A TOML file has a value for each key that it does not leave to the default. The built-in
    recipe of the method takes the values of the keys that are settings from the service's.

    Attributes:
        drafts: what the method drafts, in a few words for docs/recipes.md.
        drafter: the class of what `make` makes.
        method: its name; each recipe's own is a `Literal`, and its default.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    drafts: ClassVar[str]
    drafter: ClassVar[type[Drafter]]

    method: str

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Of the models that score, one a scorer."""
        return ()

    @property
    def largest_tree(self) -> int:
        """Most tokens of a tree that it drafts; 0 where it drafts chains."""
        return 0

    @abstractmethod
    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> Drafter:
        """A drafter.

        Args:
            scorers: one for each of `checkpoints`, in their order.
            truncation: of their distributions.
        """

    @classmethod
    def built_in_keys(cls) -> type[BaseModel]:
        """Whose fields the built-in recipe takes from the settings: those marked `Setting`."""
        return cls

    @classmethod
    def built_in(cls, **keys: Any) -> Recipe:
        """The built-in recipe.

        Args:
            keys: values of the marked fields of `built_in_keys`.
        """
        return cls(**keys)


def settings_of(recipe: type[Recipe]) -> dict[str, tuple[Setting, FieldInfo]]:
    """The keys of a method's built-in recipe that are settings."""
    found = {}
    for name, key in recipe.built_in_keys().model_fields.items():
        setting = next((mark for mark in key.metadata if isinstance(mark, Setting)), None)
        if setting is not None:
            found[name] = setting, key
    return found
