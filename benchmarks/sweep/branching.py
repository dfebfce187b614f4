"""Nodes drawn behind many contexts at once, with the rows of every model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Node:
    """A token to draw.

    Attributes:
        place: that it hangs at: 0 behind the context, i + 1 behind node i.
        model: which of the drafters draws it.
        without: earlier siblings whose tokens it is not.
    """

    place: int
    model: int = 0
    without: tuple[int, ...] = ()


@dataclass(frozen=True)
class Grown:
    """Drawn nodes behind S contexts.

    Attributes:
        tokens: [S, N].
        q: [S, N, V], each node's row, nothing taken out.
        p: [S, N+1, V], the target's row of each place.
    """

    tokens: Tensor
    q: Tensor
    p: Tensor


class Branching:
    """One model behind S contexts of one length, and what it has been fed there.

    Args:
        model: of transformers.
        contexts: [S, L] tokens.
    """

    def __init__(self, model: Any, contexts: Tensor) -> None:
        output = model(contexts, use_cache=True, logits_to_keep=1)
        self.root: Tensor = output.logits[:, -1].softmax(-1)
        self._model, self._cache = model, output.past_key_values
        self._length = contexts.shape[1]
        self._column: dict[int, int] = {}

    def feed(self, nodes: Sequence[Node], ids: Sequence[int], tokens: Tensor) -> Tensor:
        """Rows [S, n, V] behind nodes that hang at the context or behind what was fed.

        Args:
            nodes: all there are, by which a node's ancestors are known.
            ids: which are fed.
            tokens: [S, n] theirs.
        """
        before = len(self._column)
        self._column |= {node: before + i for i, node in enumerate(ids)}
        hidden = torch.finfo(torch.float32).min
        mask = torch.full((len(ids), self._length + len(self._column)), hidden)
        mask[:, : self._length] = 0
        depths = []
        for row, node in enumerate(ids):
            path = path_of(nodes, node)
            mask[row, [self._length + self._column[each] for each in path]] = 0
            depths.append(len(path) - 1)
        count = len(tokens)
        output = self._model(
            tokens,
            past_key_values=self._cache,
            use_cache=True,
            attention_mask=mask.expand(count, 1, *mask.shape),
            position_ids=(self._length + torch.tensor(depths)).expand(count, -1),
        )
        rows: Tensor = output.logits.softmax(-1)
        return rows


def path_of(nodes: Sequence[Node], node: int) -> list[int]:
    """The nodes on the way to one, itself included."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = nodes[node].place - 1
    return path


@torch.inference_mode()
def grow(
    drafters: Sequence[Any],
    target: Any,
    contexts: Tensor,
    nodes: Sequence[Node],
    generator: torch.Generator,
) -> Grown:
    """Draw all nodes, one pass a level and drafter, then one of the target over all of them."""
    behind = [Branching(drafter, contexts) for drafter in drafters]
    depths = [len(path_of(nodes, node)) for node in range(len(nodes))]
    # Row of each place by each model that draws there.
    rows = {(0, model): one.root for model, one in enumerate(behind)}
    tokens: dict[int, Tensor] = {}
    for depth in range(1, max(depths) + 1):
        level = [node for node, at in enumerate(depths) if at == depth]
        for node in level:
            law = rows[nodes[node].place, nodes[node].model]
            taken = [tokens[sibling] for sibling in nodes[node].without]
            if taken:
                law = law.scatter(1, torch.stack(taken, 1), 0.0)
            tokens[node] = torch.multinomial(law, 1, generator=generator)[:, 0]
        for model, one in enumerate(behind):
            places = {each.place for each in nodes if each.model == model}
            fed = [node for node in level if node + 1 in places]
            if fed:
                found = one.feed(nodes, fed, torch.stack([tokens[node] for node in fed], 1))
                rows |= {(node + 1, model): found[:, i] for i, node in enumerate(fed)}
    drawn = torch.stack([tokens[node] for node in range(len(nodes))], 1)
    verifying = Branching(target, contexts)
    p = verifying.feed(nodes, range(len(nodes)), drawn)
    q = torch.stack([rows[node.place, node.model] for node in nodes], 1)
    return Grown(drawn, q, torch.cat((verifying.root[:, None], p), 1))
