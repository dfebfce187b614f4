"""Trees of several small decoders at one root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from tandem.drafting.decoders.branching import LARGEST_TREE, LargestTree
from tandem.drafting.decoders.growth import Growth
from tandem.drafting.decoders.model import ModelRecipe, StopKey, ThresholdKey
from tandem.drafting.decoders.shape import ACCEPTANCE
from tandem.drafting.decoders.tree import Acceptance, TreeDrafter, TreeRecipe
from tandem.drafting.drafter import Checkpoint, Drafter, DraftSequence, Recipe, Setting, Traits
from tandem.drafting.stop import THRESHOLD
from tandem.engine.answers import DrawnTree
from tandem.engine.asks import Steps, ToHost, Truncation
from tandem.engine.scorer import Scorer
from tandem.speculation.draft import Draft
from tandem.speculation.tree import DraftShape


class ForestDrafter(Drafter):
    """Each part draws a tree of its own after the same text, one after the other.

    The first tokens of all parts are siblings, drawn without replacement: a part's row is without
    what the parts before it drew there. So no two trees meet, and after each first token stand
    the rows of its own model. A sequence has a cache of every part, and its state is the parts'
    own sequences.

    Args:
        parts: trees; a chain is one without siblings.
        largest_tree: most tokens of a draft, which the parts share.
    """

    traits = Traits(shape=DraftShape.TREE, prepares=True)

    def __init__(self, parts: Sequence[TreeDrafter], largest_tree: int) -> None:
        self._parts = tuple(parts)
        looks = parts[0].traits.looks
        self.traits = replace(self.traits, largest_tree=largest_tree, looks=looks)
        self._shares: dict[tuple[int, int], list[int]] = {}

    def open(self, sequence: DraftSequence) -> Steps[None]:
        """Take the prompt in, part by part."""
        sequence.state = []
        for part, cache in zip(self._parts, sequence.caches, strict=True):
            own = DraftSequence(
                list(sequence.token_ids), sequence.sampling, sequence.vocab_size, sequence.nodes
            )
            # A round's draws are numbered over all parts, so no two have one number.
            own.caches, own.numbers = [cache], sequence.numbers
            own.shaped, own.salt = sequence.shaped, sequence.salt
            sequence.state.append(own)
            yield from part.open(own)

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """Part by part; the tokens stay on the device until the end."""
        nodes = min(budget, self.traits.largest_tree)
        growth = Growth(nodes)
        for part, own, share in zip(
            self._parts, sequence.state, self._shared(gamma, nodes), strict=True
        ):
            if share:
                yield from part.grow(own, round_, gamma, share, growth)
        grown: DrawnTree = yield ToHost(growth.drawn, growth.places, distinct=True)
        for part, own in zip(self._parts, sequence.state, strict=True):
            part.hold(own, grown)
        return grown.draft

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        """Each part keeps what it has computed of the path that came out."""
        for part, own in zip(self._parts, sequence.state, strict=True):
            part.observe(own, emitted)
        sequence.token_ids.extend(emitted)

    def _shared(self, gamma: int, nodes: int) -> list[int]:
        """How many nodes each part draws: one each in turn, as long as it can use them."""
        if (gamma, nodes) not in self._shares:
            useful = [part.useful(gamma) for part in self._parts]
            shares = [0] * len(useful)
            while sum(shares) < min(nodes, sum(useful)):
                for i, most in enumerate(useful):
                    if shares[i] < most and sum(shares) < nodes:
                        shares[i] += 1
            self._shares[gamma, nodes] = shares
        return self._shares[gamma, nodes]


# Each is a model in memory.
MOST_PARTS = 4
_Part = Annotated[ModelRecipe | TreeRecipe, Field(discriminator="method")]


class _BuiltIn(BaseModel):
    """What the built-in forest takes from the settings: a tree's keys, and a second model."""

    acceptance: Acceptance = ACCEPTANCE
    max_nodes: LargestTree = LARGEST_TREE
    stop: StopKey = "fixed"
    threshold: ThresholdKey = THRESHOLD
    second_model: Annotated[
        str,
        Setting(
            "second_model",
            "checkpoint of the drafter that draws a chain beside MODEL's tree; empty takes MODEL"
            " twice",
        ),
    ] = ""


class ForestRecipe(Recipe):
    """The recipe of `forest`: the recipes of its parts."""

    drafts: ClassVar = "a tree of `MODEL` and a chain of `SECOND_MODEL` after the same text"
    drafter: ClassVar = ForestDrafter

    method: Literal["forest"] = "forest"
    parts: Annotated[tuple[_Part, ...], Field(min_length=2, max_length=MOST_PARTS)]
    max_nodes: LargestTree = LARGEST_TREE

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """One a part."""
        return tuple(checkpoint for part in self.parts for checkpoint in part.checkpoints)

    @property
    def largest_tree(self) -> int:
        """As the key says, of all parts together."""
        return self.max_nodes

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> Drafter:
        """See `Recipe`."""
        trees = [
            part
            if isinstance(part, TreeRecipe)
            else TreeRecipe(  # a chain is a tree without siblings
                acceptance=(1.0,),
                max_nodes=self.max_nodes,
                stop=part.stop,
                threshold=part.threshold,
            )
            for part in self.parts
        ]
        drafters = [
            tree.make([scorer], truncation) for tree, scorer in zip(trees, scorers, strict=True)
        ]
        return ForestDrafter(drafters, self.max_nodes)

    @classmethod
    def built_in_keys(cls) -> type[BaseModel]:
        """See `Recipe`."""
        return _BuiltIn

    @classmethod
    def built_in(cls, **keys: Any) -> Recipe:
        """See `Recipe`."""
        own = _BuiltIn(**keys)
        stops: dict[str, Any] = {"stop": own.stop, "threshold": own.threshold}
        tree = TreeRecipe(acceptance=own.acceptance, max_nodes=own.max_nodes, **stops)
        chain = ModelRecipe(model=own.second_model, **stops)
        return cls(parts=(tree, chain), max_nodes=own.max_nodes)
