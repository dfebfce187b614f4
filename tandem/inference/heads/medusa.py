"""Medusa's heads (arXiv 2401.10774): each guesses the token of a depth from one hidden state.

Those of multi-token prediction (arXiv 2404.19737) are a decoder layer each, over all hidden states.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from tandem.errors import StartupError
from tandem.inference.batch.packed import PackedBatch
from tandem.inference.feed import Feed, listed
from tandem.inference.heads.files import HeadFiles
from tandem.inference.heads.head import Head, HeadSource, HeadWeights, ends_of, features_of
from tandem.inference.heads.layer import HeadLayer, within
from tandem.inference.heads.parameters import HeadParameters
from tandem.inference.heads.pieces import Pieces

# The names of the authors' own files, and those of vLLM's.
_AUTHORS = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_DECODER = re.compile(r"blocks\.(\d+)\.self_attn\.")
_OF_DECODER = re.compile(
    r"blocks\.\d+\.(?:self_attn|mlp|input_layernorm|post_attention_layernorm)\..*"
)
_OUTPUT = re.compile(r"lm_heads\.(\d+)\.weight")
# A copy of the target's embedding is no loss: no head reads tokens.
_READ = re.compile(
    rf"{_AUTHORS.pattern}|{_BLOCK.pattern}|{_OUTPUT.pattern}|lm_head\.weight|embed_tokens\.weight"
    rf"|{_OF_DECODER.pattern}"
)


@dataclass(frozen=True)
class MedusaWeights:
    """The residual layers of all heads.

    Attributes:
        weights: [K, width, width] a layer.
        biases: [K, 1, width] a layer.
    """

    weights: Sequence[Tensor]
    biases: Sequence[Tensor]

    def guesses(self, states: Tensor, most: int) -> Tensor:
        """[most, N, width] of the first heads, after states [N, width]; see `residual`."""
        first = [[part[:most] for part in parts] for parts in (self.weights, self.biases)]
        return residual(states, *first)


@dataclass(frozen=True)
class MtpWeights:
    """A decoder layer for each head."""

    layers: Sequence[HeadLayer]


class MedusaHead(Head):
    """K heads; the k-th one's row is that of depth k, after the newest hidden state.

    No head sees a feed's tokens, and its `rows` says how many of the first heads' rows are wanted.
    Without decoder layers a feed has one feature.
    """

    def __init__(self, source: HeadSource) -> None:
        tensors = source.files.tensors()
        decoders = _decoders_of(tensors)
        plain = () if decoders else _residual_of(tensors, source.files).weights[0]
        self.depths = self.learnt_depths = len(decoders or plain)
        source.files.require_all_read(name for name in tensors if not _READ.fullmatch(name))
        outputs = _outputs_of(tensors)
        if sorted(outputs) not in ([], [0], list(range(self.depths))):
            raise _misshapen(source.files)
        if not outputs:
            outputs[0] = tensors["output"] = source.output()
        super().__init__(source, tensors)
        # Heads that share an output matrix often come with copies of it.
        first, *others = outputs.values()
        shared = all(torch.equal(first, other) for other in others)
        output = first if shared else torch.stack([outputs[k] for k in range(self.depths)])
        vocab_size, hidden_size = output.shape[-2:]
        self._describe(vocab_size, hidden_size)
        source.require_width(self.hidden_size)
        self._output = output.to(self.device, self._dtype)
        learnt = {name: tensor for name, tensor in tensors.items() if self._learns(name)}
        weights = self._formed(source.placed(learnt))
        self._serve(HeadWeights(0, weights))
        if isinstance(weights, MtpWeights):
            self._hold(source.room, weights.layers[0].max_length)

    def _rows(self, feeds: Sequence[Feed]) -> Tensor:
        most = max(feed.rows for feed in feeds)
        found = self._found(feeds, most)
        if self._output.dim() == 2:
            logits = linear(found, self._output)
        else:
            logits = found.bmm(self._output[:most].transpose(1, 2))
        by_feed = logits.transpose(0, 1).flatten(0, 1)
        if all(feed.rows == most for feed in feeds):
            return by_feed
        wanted = [i * most + row for i, feed in enumerate(feeds) for row in range(feed.rows)]
        return by_feed[torch.tensor(wanted).to(self.device, non_blocking=True)]

    def _found(self, feeds: Sequence[Feed], most: int) -> Tensor:
        """[most, B, width] what the output matrix reads, of the first heads and each feed."""
        states = features_of(feeds, self.device, self._dtype)[:, -1]
        parts: MedusaWeights | MtpWeights = self._weights_of(feeds[0]).parts
        if isinstance(parts, MedusaWeights):
            return parts.guesses(states, most)
        assert self._pool is not None
        batch, ends = PackedBatch.of(feeds, self.device), ends_of(feeds, self.device)
        # Those whose rows are not wanted remember the states too.
        found = [
            layer(states, batch, self._pool, number=k).index_select(0, ends)
            for k, layer in enumerate(parts.layers)
        ]
        for feed in feeds:
            feed.cache.grow(listed(feed.token_ids), feed.parents)
        return torch.stack(found[:most])

    def _learns(self, name: str) -> bool:
        return bool(_BLOCK.fullmatch(name) or _OF_DECODER.fullmatch(name)) or (
            ".linear." in name and bool(_AUTHORS.fullmatch(name))
        )

    def _formed(self, tensors: Mapping[str, Tensor]) -> MedusaWeights | MtpWeights:
        decoders = _decoders_of(tensors)
        if not decoders:
            return _residual_of(tensors, self._source.files)
        shape = self._source.files.config.get("layer_config", {})
        return MtpWeights([HeadLayer(shape, layer) for layer in decoders])

    def guesses(
        self, weights: HeadParameters, states: Tensor, paths: Tensor, piece: Tensor
    ) -> list[Tensor]:
        """See `Head`; no head knows a token."""
        named, states = weights.by_name, states[:, -1]
        parts: MedusaWeights | MtpWeights = self._weights.parts
        if isinstance(parts, MedusaWeights):
            return list(_residual_of(named, self._source.files).guesses(states, self.depths))
        pieces = Pieces(piece)
        padded = pieces.padded(states)
        return [
            pieces.flat(layer.over_pieces(own)(padded))
            for layer, own in zip(parts.layers, _decoders_of(named), strict=True)
        ]

    def logits(self, read: Tensor, depth: int) -> Tensor:
        """See `Head`."""
        own = self._output if self._output.dim() == 2 else self._output[depth - 1]
        return linear(read, own)


def residual(states: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """[K, N, width]: what each of K heads makes of states [N, width], x + SiLU(W x + b) a layer.

    Args:
        states: of the target.
        weights: [K, width, width] a layer.
        biases: [K, 1, width] a layer.
    """
    found = states.expand(len(weights[0]), *states.shape)
    for weight, bias in zip(weights, biases, strict=True):
        found = found + silu(torch.baddbmm(bias, found, weight.transpose(1, 2)))
    return found


def _outputs_of(tensors: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """The output matrix [V, width] of each head; one that all share is head 0's."""
    found: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        named = _OUTPUT.fullmatch(name)
        if named is None and ".linear." not in name:
            named = _AUTHORS.fullmatch(name)
        if named or name == "lm_head.weight":
            found[int(named[1]) if named else 0] = tensor
    return found


def _decoders_of(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The weights of each head's decoder layer; none if heads have no such."""
    heads = {int(named[1]) for name in tensors if (named := _DECODER.match(name))}
    return [within(tensors, f"blocks.{head}.") for head in range(len(heads))]


def _residual_of(tensors: Mapping[str, Tensor], files: HeadFiles) -> MedusaWeights:
    """The residual layers.

    Raises:
        StartupError: they are no Medusa's.
    """
    blocks: dict[tuple[int, int, str], Tensor] = {}
    for name, tensor in tensors.items():
        named = _BLOCK.fullmatch(name)
        if named is None and ".linear." in name:
            named = _AUTHORS.fullmatch(name)
        if named:
            blocks[int(named[1]), int(named[2]), named[3]] = tensor
    heads = 1 + max((head for head, _, _ in blocks), default=-1)
    layers = 1 + max((layer for _, layer, _ in blocks), default=-1)
    grid = [[blocks.get((k, layer, "weight")) for k in range(heads)] for layer in range(layers)]
    if not grid or any(part is None for row in grid for part in row):
        raise StartupError(
            f"the head {files.path} has not Medusa's weights: looked for HEAD.LAYER.linear.weight"
            " and for blocks.HEAD.layers.LAYER.weight or blocks.HEAD.self_attn"
        )
    weights = [torch.stack([part for part in row if part is not None]) for row in grid]
    width = weights[0].shape[-1]
    if any(weight.shape[1:] != (width, width) for weight in weights):
        raise _misshapen(files)
    none = weights[0].new_zeros(width)
    biases = [
        torch.stack([blocks.get((k, layer, "bias"), none) for k in range(heads)])[:, None]
        for layer in range(layers)
    ]
    return MedusaWeights(weights, biases)


def _misshapen(files: HeadFiles) -> StartupError:
    return StartupError(f"the head {files.path}: its weights have not Medusa's shapes")
