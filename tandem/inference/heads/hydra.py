"""Hydra's heads (arXiv 2402.05109): each guesses the token of a depth from a hidden state and the
tokens of the path after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from tandem.errors import StartupError
from tandem.inference.batch.packed import PackedBatch, tokens_of
from tandem.inference.feed import Feed, listed
from tandem.inference.heads.files import HeadFiles
from tandem.inference.heads.head import (
    Head,
    HeadCache,
    HeadSource,
    HeadWeights,
    ends_of,
    features_of,
)
from tandem.inference.heads.layer import HeadLayer, within
from tandem.inference.heads.parameters import HeadParameters
from tandem.inference.heads.pieces import Pieces

_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?weight")
# As the authors spell it.
_PREFIX = "prefix_embeding_layer."
_READ = re.compile(
    rf"{_BLOCK.pattern}|{_OUTPUT.pattern}|(?:{re.escape(_PREFIX)})?embed_tokens\.weight"
    rf"|{re.escape(_PREFIX)}(?:norm\.weight|layers\.0\..*)|lm_head\.weight"
)


@dataclass(eq=False, slots=True)
class HydraCache(HeadCache):
    """What a sequence's places are computed from.

    Attributes:
        paths: of the trunk's end and of each branch row: the hidden state, and the embeddings of
            the tokens after it, [(1 + tokens) * width].
    """

    paths: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class HydraBlock:
    """A layer of a head: R x + SiLU(W x + b); R is the identity but in the first one."""

    weight: Tensor
    bias: Tensor
    kept: Tensor | None
    kept_bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] to [n, width]."""
        kept = x if self.kept is None else linear(x, self.kept, self.kept_bias)
        return kept + silu(linear(x, self.weight, self.bias))


@dataclass(frozen=True)
class HydraWeights:
    """All that is learnt.

    Attributes:
        heads: the layers of each.
        prefix: reads all features before the heads do (Hydra++); None without it.
        prefix_norm: after it.
    """

    heads: Sequence[Sequence[HydraBlock]]
    prefix: HeadLayer | None = None
    prefix_norm: Callable[[Tensor], Tensor] | None = None


def guess(blocks: Sequence[HydraBlock], x: Tensor) -> Tensor:
    """What the output matrix reads [n, width], by the layers of a head over a state and the
    embeddings of the path after it [n, (1 + tokens) * width]."""
    for block in blocks:
        x = block(x)
    return x


class HydraHead(Head):
    """K heads; the k-th one's row is that of depth k after a path of k tokens.

    Of a feed of the trunk the newest pair counts, of a feature and the token after it; with a
    prefix layer (Hydra++) that layer reads all features. One of branch rows has the drawn tokens.
    """

    cache = HydraCache

    def __init__(self, source: HeadSource) -> None:
        tensors = source.files.tensors()
        source.files.require_all_read(name for name in tensors if not _READ.fullmatch(name))
        own = tensors.pop(f"{_PREFIX}embed_tokens.weight", None)
        table = tensors.get("embed_tokens.weight", own)
        tensors["embed_tokens.weight"] = source.embedding() if table is None else table
        outputs = {int(m[1]): n for n in tensors if (m := _OUTPUT.fullmatch(n))}
        if not outputs:
            own_output = tensors.get("lm_head.weight")
            tensors["output"] = source.output() if own_output is None else own_output
        super().__init__(source, tensors)
        placed = source.placed(tensors)
        self._embedding = placed["embed_tokens.weight"]
        vocab_size, hidden_size = self._embedding.shape
        self._describe(vocab_size, hidden_size)
        source.require_width(self.hidden_size)
        weights = self._formed(placed)
        self.depths = self.learnt_depths = len(weights.heads)
        self._serve(HeadWeights(0, weights))
        self._outputs = [placed[outputs.get(k, "output")] for k in range(self.depths)]
        if weights.prefix is not None:
            self._hold(source.room, weights.prefix.max_length)

    def _rows(self, feeds: Sequence[Feed]) -> Tensor:
        tokens = self._embedding.index_select(0, tokens_of(feeds, self.device))
        weights: HydraWeights = self._weights_of(feeds[0]).parts
        states = iter(self._states([feed for feed in feeds if feed.features is not None], weights))
        # By depth: the inputs of a head, and where its rows go.
        inputs: dict[int, list[Tensor]] = {}
        places: dict[int, list[int]] = {}
        first = count = 0
        for feed in feeds:
            cache, end = feed.cache, first + len(feed.token_ids)
            assert isinstance(cache, HydraCache)
            if feed.features is not None:
                new = [torch.cat((next(states), tokens[end - 1]))]
                cache.paths = ()
            else:
                assert feed.parents
                new = [
                    torch.cat((cache.paths[parent], token))
                    for parent, token in zip(feed.parents, tokens[first:end], strict=True)
                ]
            cache.paths = (*cache.paths, *new)
            cache.grow(listed(feed.token_ids), feed.parents)
            for path in new[len(new) - feed.rows :]:
                depth = len(path) // self.hidden_size - 2
                inputs.setdefault(depth, []).append(path)
                places.setdefault(depth, []).append(count)
                count += 1
            first = end
        rows = self._embedding.new_empty(count, self.vocab_size)
        for depth, paths in inputs.items():
            found = guess(weights.heads[depth], torch.stack(paths))
            index = torch.tensor(places[depth]).to(self.device, non_blocking=True)
            rows.index_copy_(0, index, linear(found, self._outputs[depth]))
        return rows

    def _states(self, feeds: Sequence[Feed], weights: HydraWeights) -> Tensor:
        """[B, width] what the heads read of the newest feature of each feed of the trunk."""
        if not feeds:
            return self._embedding[:0]
        features = features_of(feeds, self.device, self._dtype)[:, 0]
        ends = ends_of(feeds, self.device)
        if weights.prefix is None:
            return features[ends]
        assert self._pool is not None
        assert weights.prefix_norm is not None
        found = weights.prefix(features, PackedBatch.of(feeds, self.device), self._pool)
        return weights.prefix_norm(found[ends])

    def _learns(self, name: str) -> bool:
        return bool(_BLOCK.fullmatch(name)) or name.startswith(
            (f"{_PREFIX}layers.", f"{_PREFIX}norm.")
        )

    def _formed(self, tensors: Mapping[str, Tensor]) -> HydraWeights:
        heads = _blocks_of(tensors, self._source.files, self.hidden_size)
        layer = within(tensors, f"{_PREFIX}layers.0.")
        if not layer:
            return HydraWeights(heads)
        config = self._source.files.config
        shape = config.get("prefix_config", {**config, "model_type": "llama"})
        prefix = HeadLayer(shape, layer)
        return HydraWeights(heads, prefix, prefix.norm(tensors[f"{_PREFIX}norm.weight"]))

    def guesses(
        self, weights: HeadParameters, states: Tensor, paths: Tensor, piece: Tensor
    ) -> list[Tensor]:
        """See `Head`; the head of a depth reads all tokens before its own."""
        named, states = weights.by_name, states[:, 0]
        prefix: HeadLayer | None = self._weights.parts.prefix
        if prefix is not None:
            pieces = Pieces(piece)
            layer = prefix.over_pieces(within(named, f"{_PREFIX}layers.0."))
            found = layer.norm(named[f"{_PREFIX}norm.weight"])(layer(pieces.padded(states)))
            states = pieces.flat(found)
        inputs = torch.cat([states[:, None], embedding(paths, self._embedding)], 1).flatten(1)
        return [
            guess(blocks, inputs[:, : (2 + k) * self.hidden_size])
            for k, blocks in enumerate(_blocks_of(named, self._source.files, self.hidden_size))
        ]

    def logits(self, read: Tensor, depth: int) -> Tensor:
        """See `Head`."""
        return linear(read, self._outputs[depth - 1])


def _blocks_of(
    tensors: Mapping[str, Tensor], files: HeadFiles, width: int
) -> list[list[HydraBlock]]:
    """The layers of each head.

    Raises:
        StartupError: they are no Hydra's.
    """
    found: dict[int, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if named := _BLOCK.fullmatch(name):
            layers = found.setdefault(int(named[1]), {})
            layers.setdefault(int(named[2]), {})[f"{named[3]}.{named[4]}"] = tensor
    heads: list[list[HydraBlock]] = []
    for k in range(len(found)):
        blocks = [
            HydraBlock(
                parts["linear.weight"],
                parts.get("linear.bias", parts["linear.weight"].new_zeros(width)),
                parts.get("res_connection.weight"),
                parts.get("res_connection.bias"),
            )
            for _, parts in sorted(found.get(k, {}).items())
            if "linear.weight" in parts
        ]
        wide = (width, (2 + k) * width)
        shapes = [tuple(block.weight.shape) for block in blocks]
        if shapes[:1] != [wide] or set(shapes[1:]) - {(width, width)}:
            raise StartupError(f"the head {files.path}: its weights have not Hydra's shapes")
        heads.append(blocks)
    if not heads:
        raise StartupError(
            f"the head {files.path} has not Hydra's weights: looked for"
            " hydra_mlp.HEAD.LAYER.linear.weight"
        )
    return heads
