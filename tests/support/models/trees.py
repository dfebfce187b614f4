"""Random trees that continue random texts, and the plain pass of each of their paths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.inference.decoder import Decoder
from tandem.inference.feed import Feed
from tandem.inference.kv.branches import Branches
from tandem.inference.kv.extents import SequenceCache
from tests.support.models.architectures import VOCAB_SIZE, Architecture
from tests.support.models.parity import plain

# Less than the depth of some of the trees.
NARROW = 3
MOST_NODES = 16


@dataclass
class Tree:
    """A text, branches after it, and the tokens that follow the kept path.

    Attributes:
        trunk: at least one token.
        tokens: of the branch rows.
        parents: of each row: 0, or an earlier row, counted from 1.
        cut: number of rows fed first, with the trunk's last token; the others are fed after them.
        path: the rows that are kept.
        later: tokens after the path.
    """

    trunk: list[int]
    tokens: list[int]
    parents: list[int]
    cut: int
    path: list[int]
    later: list[int]

    @classmethod
    def random(cls, rng: random.Random, longest: int = 21) -> Tree:
        nodes = rng.randint(2, MOST_NODES)
        # In some trees most rows hang at the row before, so that they are deep.
        deep = rng.choice((0.2, 0.6, 0.9))
        parents = [i if rng.random() < deep else rng.randint(0, i) for i in range(nodes)]
        path = [rng.randint(1, nodes)]
        while parents[path[0] - 1]:
            path.insert(0, parents[path[0] - 1])
        trunk, later, tokens = (
            [rng.randrange(VOCAB_SIZE) for _ in range(count)]
            for count in (rng.randint(1, longest), rng.randint(1, 6), nodes)
        )
        path = path[: rng.randint(0, len(path))]
        return cls(trunk, tokens, parents, rng.randint(1, nodes - 1), path, later)

    def text_to(self, row: int) -> list[int]:
        """The trunk and the path to a row; 0 for the trunk's end."""
        if not row:
            return self.trunk
        return [*self.text_to(self.parents[row - 1]), self.tokens[row - 1]]

    @property
    def texts(self) -> list[list[int]]:
        """That end at the trunk's end, at each row, and at each of the later tokens."""
        ends = range(len(self.kept) - len(self.later) + 1, len(self.kept) + 1)
        rows = [self.text_to(row) for row in range(1 + len(self.tokens))]
        return [*rows, *(self.kept[:end] for end in ends)]

    @property
    def kept(self) -> list[int]:
        """The trunk, the kept path and the later tokens."""
        return [*self.text_to(self.path[-1] if self.path else 0), *self.later]

    def feeds(self, cache: SequenceCache) -> list[Feed]:
        """The two feeds with branches, after a prompt of the trunk without its last token."""
        cut = self.cut
        return [
            Feed(cache, [self.trunk[-1], *self.tokens[:cut]], cut + 1, self.parents[:cut]),
            Feed(cache, self.tokens[cut:], len(self.tokens) - cut, self.parents[cut:]),
        ]


def narrow(row: Architecture) -> dict[str, int]:
    """Options for a window that is narrower than the trees are deep."""
    return {"sliding_window": NARROW} if row.slides else {}


def random_trees(seed: int, longest: int = 21) -> list[Tree]:
    rng = random.Random(seed)
    trees = [Tree.random(rng, longest) for _ in range(20)]
    assert max(Branches().grown(tree.parents).depth for tree in trees) > 2 * NARROW
    assert max(len(tree.path) for tree in trees) > NARROW
    return trees


@torch.inference_mode()
def plain_rows(model: PreTrainedModel, trees: Sequence[Tree]) -> list[Tensor]:
    """For each tree the expected result of `tree_rows`, [1 + nodes + later, V]: each row is that
    of its own text's end in a plain pass, without the other branches."""
    wanted = [tree.texts for tree in trees]
    # A text that another one goes on from has its row in the other's pass.
    passes: list[list[int]] = []
    place: dict[tuple[int, ...], tuple[int, int]] = {}
    for text in sorted({tuple(text) for texts in wanted for text in texts}, key=len, reverse=True):
        if text not in place:
            place |= {text[: i + 1]: (len(passes), i) for i in range(len(text))}
            passes.append(list(text))
    longest = len(passes[0])
    # The padding after a text does not change the text's logits.
    batch = torch.tensor([text + [0] * (longest - len(text)) for text in passes])
    logits = plain(model)(input_ids=batch, use_cache=False).logits
    found = []
    for texts in wanted:
        batch_rows, ends = zip(*(place[tuple(text)] for text in texts), strict=True)
        found.append(logits[batch_rows, ends])
    return found


@torch.inference_mode()
def tree_rows(decoder: Decoder, trees: Sequence[Tree]) -> list[Tensor]:
    """The rows from one sequence per tree, with all sequences together in each pass."""
    caches = []
    for tree in trees:
        nodes = len(tree.tokens)
        cache = decoder.reserve(len(tree.trunk) + nodes + len(tree.later), nodes)
        assert cache is not None
        caches.append(cache)
    prompts = [
        Feed(cache, tree.trunk[:-1], 0)
        for cache, tree in zip(caches, trees, strict=True)
        if len(tree.trunk) > 1
    ]
    if prompts:
        decoder.forward(prompts)
    parts: list[list[Tensor]] = [[] for _ in trees]
    feeds = [tree.feeds(cache) for cache, tree in zip(caches, trees, strict=True)]
    for nth in range(2):
        _take(decoder, [own[nth] for own in feeds], parts)
    for cache, tree in zip(caches, trees, strict=True):
        cache.keep(tree.path)
        assert cache.length == len(tree.kept) - len(tree.later)
    later = [
        Feed(cache, tree.later, len(tree.later)) for cache, tree in zip(caches, trees, strict=True)
    ]
    _take(decoder, later, parts)
    for cache in caches:
        decoder.release(cache)
    return [torch.cat(part) for part in parts]


def _take(decoder: Decoder, feeds: Sequence[Feed], parts: Sequence[list[Tensor]]) -> None:
    logits = torch.split(decoder.forward(feeds).logits.cpu(), [feed.rows for feed in feeds])
    for part, rows in zip(parts, logits, strict=True):
        part.append(rows)


def worst_of(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """The largest difference of any logit."""
    pairs = zip(expected, found, strict=True)
    return max(float((theirs - ours).abs().max()) for theirs, ours in pairs)
