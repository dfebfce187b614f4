"""Rows, and drafts near them, as the kernels of draws and verdicts take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.kernels import draws, verdicts
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree_batch import walk_of

# Each cut alone, and together; none; the likeliest token.
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(top_k=5),
    Sampling(top_p=0.8),
    Sampling(temperature=0.7, top_k=40, top_p=0.9),
    Sampling(min_p=0.1),
    Sampling(temperature=0),
    Sampling(top_p=0.5, min_p=0.05),
]


def drawn_from(
    rows: Sequence[int], size: int, samplings: Sequence[Sampling], siblings: int, seed: int = 1
) -> Tensor:
    """What is asked of draws, with numbers of their own."""
    asked = draws.asked_of(rows, size, samplings, siblings)
    numbers = np.random.default_rng(seed)
    asked[:, draws.DIGITS :] = numbers.integers(0, 2**32, (len(samplings), 2 * siblings))
    asked[:, draws.DISTINCT] = 1
    return torch.from_numpy(asked)


@dataclass(frozen=True)
class Drafted:
    """What verdicts are asked by: see `verdicts.decide`."""

    logits: Tensor
    places: Tensor
    asked: Tensor
    rows: Tensor

    def to(self, device: str) -> Drafted:
        """The same elsewhere."""
        return Drafted(*(part.to(device) for part in vars(self).values()))


@dataclass(frozen=True)
class Kind:
    """A text's draft.

    Attributes:
        parents: of its nodes.
        certain: whether its tokens were not drawn; else siblings are distinct.
        on_device: whether its tokens are read from its rows: those of chains.
        broken: whether its last row has no weight.
    """

    parents: Sequence[int]
    certain: bool = False
    on_device: bool = False
    broken: bool = False


CHAIN = Kind((0, 1, 2, 3), on_device=True)
KINDS = [
    CHAIN,
    Kind(()),
    Kind((0, 0, 1, 1, 2)),
    Kind((0, 0, 0, 1, 2, 2), certain=True),
    Kind((0, 1, 2), certain=True),
    Kind((0, 1, 2), on_device=True, broken=True),
]


def drafted(
    kinds: Sequence[Kind], size: int, width: int, seed: int, samplings: Sequence[Sampling]
) -> Drafted:
    """Drafts from rows of at most `width` of `size` tokens, which are near their targets'."""
    numbers = np.random.default_rng(seed)
    likely = 2 * numbers.standard_normal(size)
    count = sum(len(kind.parents) + 1 for kind in kinds)
    logits = torch.from_numpy(likely + 0.6 * numbers.standard_normal((count, size)))
    rows, asked, parts, firsts = [np.zeros((0, 1 + 2 * width), np.int64)], [], [], [0]
    most = max(len(kind.parents) for kind in kinds)
    uniforms = numbers.random((len(kinds), most + 1))
    for kind in kinds:
        nodes = len(kind.parents)
        tokens, row_of = [-1] * nodes, [-1] * nodes
        for place in sorted(set(kind.parents)):
            children = [node for node, parent in enumerate(kind.parents) if parent == place]
            # The target's likeliest are among them: else nothing is accepted.
            best = np.argsort(-likely)[: min(width, size) // 2]
            others = numbers.permutation(np.setdiff1d(np.arange(size), best))
            ids = np.concatenate((best, others))[: min(width, size)]
            near = np.exp(likely[ids] - likely[ids].max() - 0.3 * numbers.random(len(ids)))
            weights = np.maximum(1, np.rint(65535 * near)).astype(np.int64)
            taken = numbers.choice(ids, len(children), replace=False, p=weights / weights.sum())
            if kind.broken and place == max(kind.parents):
                weights[:] = 0
            if not kind.certain:
                fill = np.zeros(width - len(ids), np.int64)
                rows.append(np.concatenate((taken[:1], ids, fill, weights, fill))[None])
            for node, token in zip(children, taken.tolist(), strict=True):
                tokens[node] = -1 if kind.on_device else token
                row_of[node] = -1 if kind.certain else len(rows) - 2
        parts.append((kind.parents, walk_of(kind.parents), row_of, tokens))
        own = samplings[int(numbers.integers(len(samplings)))]
        asked += [own] * (nodes + 1)
        firsts.append(firsts[-1] + nodes + 1)
    distinct = [not kind.certain for kind in kinds]
    return Drafted(
        logits.float(),
        torch.from_numpy(draws.asked_of(range(count), size, asked)),
        torch.from_numpy(verdicts.asked_of(firsts[:-1], distinct, uniforms, parts)),
        torch.from_numpy(np.concatenate(rows)),
    )
