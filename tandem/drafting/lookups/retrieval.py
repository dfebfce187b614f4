"""Drafts by looking up how texts went on: in this text, in an index of texts, or in its bigrams.

Prompt lookup (Saxena 2023), REST (He et al., arXiv 2311.08252) and Max-Gram (Chen et al., arXiv
2312.11462) are choices of stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_serializer

from tandem.drafting.decoders.branching import LARGEST_TREE, LargestTree
from tandem.drafting.drafter import (
    DraftedVocabulary,
    Drafter,
    DraftSequence,
    Recipe,
    Setting,
    Traits,
)
from tandem.drafting.part import PartDrafter
from tandem.engine.asks import Steps, Truncation
from tandem.engine.scorer import Scorer
from tandem.retrieval.corpus import BigramStore, CorpusStore, OpenIndex
from tandem.retrieval.index import Index, find_index
from tandem.retrieval.merged import MergedTree
from tandem.retrieval.prompt import PromptStore
from tandem.retrieval.store import TextStore
from tandem.speculation.draft import Draft
from tandem.speculation.tree import DraftShape


class RetrievalDrafter(PartDrafter):
    """Merges continuations to a tree of certain tokens; needs no model.

    Stores fill the tree one after the other, each with its longest match first. It is not pure:
    what it guesses depends on where a round starts, and it may find nothing.

    Args:
        stores: at least one.
        largest_tree: most tokens of a draft.
        index: whose ids the stores have; None for those of any vocabulary.
    """

    traits = Traits(shape=DraftShape.TREE)

    def __init__(
        self, stores: Sequence[TextStore], largest_tree: int, index: Index | None = None
    ) -> None:
        self._stores = tuple(stores)
        self.traits = replace(self.traits, largest_tree=largest_tree)
        if index is not None:
            about = index.about
            vocabulary = DraftedVocabulary(about.tokenizer, about.vocab_size)
            self.traits = replace(self.traits, vocabulary=vocabulary, data=about.fingerprint)

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        """What followed; nothing where no store knows anything."""
        yield from ()
        tree = MergedTree(min(budget, self.traits.largest_tree), sequence.vocab_size)
        for store in self._stores:
            tree.fill(store.continuations(sequence.token_ids, gamma))
        return Draft.certain(tree.token_ids, tree.parents)


StoreName = Literal["prompt", "corpus", "bigrams"]


class RetrievalRecipe(Recipe):
    """The recipe of `retrieval`."""

    drafts: ClassVar = "a tree of what followed the text's last tokens before; no model"
    drafter: ClassVar = RetrievalDrafter

    method: Literal["retrieval"] = "retrieval"
    stores: Annotated[
        tuple[StoreName, ...],
        Field(min_length=1, max_length=3),
        Setting(
            "stores",
            "sources in order, comma separated; a later one fills what earlier ones leave of the"
            " tree: prompt (the text itself), corpus (an index of texts), bigrams (of the index)",
        ),
    ] = ("prompt",)
    match: Annotated[
        int,
        Field(ge=1, le=64),
        Setting(
            "match",
            "length of the longest match of last tokens to look for; shorter ones are tried next",
        ),
    ] = 16
    window: Annotated[
        int,
        Field(ge=2, le=65_536),
        Setting("lookup_window", "how many of the text's last tokens are searched"),
    ] = 4096
    index: Annotated[
        str,
        Setting(
            "index",
            "folder of an index (`tandem index build`); empty takes the only one in the cache"
            " folder",
        ),
    ] = ""
    max_nodes: LargestTree = LARGEST_TREE

    @field_serializer("index")
    def _name(self, path: str) -> str:
        """Without its place on this machine: what is told to callers."""
        return Path(path).name

    @property
    def largest_tree(self) -> int:
        """As the key says."""
        return self.max_nodes

    def make(self, scorers: Sequence[Scorer], truncation: Truncation) -> Drafter:
        """See `Recipe`."""
        index = Index(find_index(self.index)) if set(self.stores) - {"prompt"} else None
        opened = None if index is None else OpenIndex(index)
        stores: list[TextStore] = []
        for name in self.stores:
            if opened is None or name == "prompt":
                stores.append(PromptStore(self.match, self.window))
            elif name == "corpus":
                stores.append(CorpusStore(opened, self.match))
            else:
                stores.append(BigramStore(opened))
        return RetrievalDrafter(stores, self.max_nodes, index)
