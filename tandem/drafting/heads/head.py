"""What the recipes of all heads have in common."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, field_serializer

from tandem.drafting.branching import LARGEST_TREE, LargestTree
from tandem.drafting.drafter import Checkpoint, Recipe, Setting
from tandem.drafting.shape import TreeShape, likeliest_by_depth

# By depth and sibling rank.
AcceptanceByDepth = tuple[tuple[float, ...], ...]


def deepened(acceptance: AcceptanceByDepth, depth: int) -> AcceptanceByDepth:
    """So many levels: those that nobody measured are like the last one."""
    return (acceptance + acceptance[-1:] * (depth - len(acceptance)))[:depth]


# Texts share their shapes, of which there is one a size.
@lru_cache(maxsize=4096)
def shape_of(acceptance: AcceptanceByDepth, nodes: int) -> TreeShape:
    """The tree of the likeliest nodes, at most so many."""
    return likeliest_by_depth(acceptance, nodes)


def _falling(value: AcceptanceByDepth) -> AcceptanceByDepth:
    for ranks in value:
        if list(ranks) != sorted(ranks, reverse=True) or not 0 < ranks[-1] <= ranks[0] <= 1:
            raise ValueError("must be shares in (0, 1] that fall with the sibling's rank")
    return value


_Ranks = Annotated[tuple[float, ...], Field(min_length=1, max_length=16)]


class OfHead(Recipe):
    """A recipe with one head.

    Attributes:
        model: the head's folder; empty takes MODEL.
        target: the checkpoint that it is for; empty takes TARGET.
        acceptance: by depth and sibling rank; none takes the head's own.
        certain: send the likeliest tokens as certain ones.
    """

    model: str = ""
    target: str = ""
    acceptance: Annotated[
        tuple[_Ranks, ...] | None, Field(max_length=64), AfterValidator(lambda v: v and _falling(v))
    ] = None
    certain: Annotated[
        bool, Setting("certain", "send the likeliest tokens as certain ones instead of drawing")
    ] = False
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
