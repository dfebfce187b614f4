"""The tree structure of drafts, laid out for rules that decide a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.speculation.tree import Tree


@dataclass(frozen=True, slots=True)
class Siblings:
    """Nodes that are judged together: at most one from each place, all of one rank.

    Attributes:
        batch: [n] int64, index of each node's draft.
        node: [n] int64, index of the node in its draft.
        place: [n] int64, the place that it hangs at.
        before: [n] int64, index of its sibling of the next lower rank in that rank's `Siblings`.
            Empty for rank 0.
        earlier: [n, rank] int64, its earlier siblings, in order.
    """

    batch: Tensor
    node: Tensor
    place: Tensor
    before: Tensor
    earlier: Tensor


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """Trees of a batch of drafts. Place 0 is the root, place i + 1 comes after node i.

    Attributes:
        parents: [B, N] int64, the place that a node hangs at; 0 for padding.
        home: [B, N] int64, the place that a kept node leads to: its own; for a twin, which repeats
            an earlier sibling's token, that sibling's.
        depth: [B, N+1] int64, depth of each place.
        children: [B, N+1, C] int64, nodes at each place in the order they were drawn, then -1.
        order: [B, N] int64, index of a node in a walk that visits children before their parents
            and siblings in order; N for padding.
        levels: for each depth of places, for each rank of siblings, the nodes.
    """

    parents: Tensor
    home: Tensor
    depth: Tensor
    children: Tensor
    order: Tensor
    levels: Sequence[Sequence[Siblings]]

    @classmethod
    def of(
        cls,
        parents: Sequence[Sequence[int]],
        token_ids: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> TreeBatch:
        """Lay out a batch; `parents` and `token_ids` have one entry per node of each draft."""
        most = max((len(one) for one in parents), default=0)
        kinds: dict[tuple[int, ...], int] = {}
        which = [kinds.setdefault(tuple(one), len(kinds)) for one in parents]
        shapes = [_shape_of(kind) for kind in kinds]
        widest = max((len(nodes) for shape in shapes for nodes in shape.children), default=0)
        # Of each kind of shape, then of each draft.
        arrays = {
            "parents": np.zeros((len(kinds), most), np.int64),
            "depth": np.zeros((len(kinds), most + 1), np.int64),
            "children": np.full((len(kinds), most + 1, widest), -1, np.int64),
            "order": np.full((len(kinds), most), most, np.int64),
        }
        for k, (kind, shape) in enumerate(zip(kinds, shapes, strict=True)):
            count = len(kind)
            arrays["parents"][k, :count] = kind
            arrays["depth"][k, : count + 1] = shape.depth
            arrays["order"][k, :count] = shape.order
            for place, nodes in enumerate(shape.children):
                arrays["children"][k, place, : len(nodes)] = nodes
        arrays = {name: array[which] for name, array in arrays.items()}
        levels = _levels(arrays["children"], arrays["depth"], device)
        arrays["home"] = np.zeros((len(parents), most), np.int64)
        for home, own, tokens in zip(arrays["home"], parents, token_ids, strict=True):
            home[: len(own)] = Tree(own).homes(tokens)
        tensors = {name: _sent(array, device) for name, array in arrays.items()}
        return cls(**tensors, levels=levels)

    @property
    def paths(self) -> int:
        """The greatest depth of a place."""
        return len(self.levels)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What follows from a draft's parents alone, on the host; shared by drafts with the same.

    Attributes:
        children: nodes at each place.
        depth: of each place.
        order: each node's index in the walk from the leaves.
    """

    children: list[list[int]]
    depth: list[int]
    order: list[int]

    @classmethod
    def of(cls, parents: Sequence[int]) -> _Shape:
        """The shape of a draft."""
        tree = Tree(parents)
        children = [[place - 1 for place in places] for places in tree.children]
        return cls(children, tree.depths, _order(children))


# Calibrated shapes are few, and recur in each round.
_shape_of = lru_cache(maxsize=256)(_Shape.of)


def walk_of(parents: Sequence[int]) -> list[int]:
    """Each node's index in a walk that visits children before their parents, siblings in order."""
    return _shape_of(tuple(parents)).order


def _order(children: Sequence[Sequence[int]]) -> list[int]:
    """Each node's index in the walk from the leaves."""
    came = [0] * (len(children) - 1)
    pending, count = [iter(children[0])], 0
    path: list[int] = []
    while pending:
        node = next(pending[-1], None)
        if node is not None:
            path.append(node)
            pending.append(iter(children[node + 1]))
            continue
        pending.pop()
        if path:
            came[path.pop()] = count
            count += 1
    return came


def _levels(
    children: npt.NDArray[np.int64], depth: npt.NDArray[np.int64], device: torch.device | str
) -> list[list[Siblings]]:
    """The nodes by the depth of their places, then by rank.

    Args:
        children: [B, N+1, C], see `TreeBatch`.
        depth: [B, N+1], see `TreeBatch`.
        device: for the result.
    """
    levels: list[list[Siblings]] = []
    for level in range(int(depth.max(initial=0))):
        ranks: list[Siblings] = []
        slots = np.zeros(depth.shape, np.int64)
        for rank in range(children.shape[2]):
            batch, place = ((depth == level) & (children[:, :, rank] >= 0)).nonzero()
            if not len(batch):
                break
            before = slots[batch, place] if rank else np.zeros(0, np.int64)
            slots[batch, place] = np.arange(len(batch))
            own = children[batch, place]
            parts = (batch, own[:, rank], place, before, own[:, :rank])
            ranks.append(Siblings(*(_sent(part, device) for part in parts)))
        levels.append(ranks)
    return levels


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each node follows the one before it."""
    return all(after == before + 1 for before, after in pairwise((-1, *parents)))


def _sent(array: npt.NDArray[np.int64], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
