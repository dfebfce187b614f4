"""Medusa's heads (arXiv 2401.10774): each guesses the token of a depth from one hidden state."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from tandem.errors import StartupError
from tandem.inference.feed import Feed
from tandem.inference.heads.files import HeadFiles
from tandem.inference.heads.head import Head, Source, features_of

# The names of the authors' own files, and those of vLLM's.
_AUTHORS = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_OUTPUT = re.compile(r"lm_heads\.(\d+)\.weight")


class MedusaHead(Head):
    """K heads on the newest hidden state; the k-th one's row is that of depth k.

    A feed has one token, which no head sees, its feature, and `rows` says how many of the first
    heads' rows are wanted.
    """

    def __init__(self, source: Source) -> None:
        tensors = source.files.tensors()
        weights, biases, outputs = _sorted(tensors, source.files)
        if not outputs:
            outputs = [source.output()]
            tensors["output"] = outputs[0]
        super().__init__(source, tensors)
        # Heads that share an output matrix often come with copies of it.
        shared = all(torch.equal(outputs[0], other) for other in outputs[1:])
        output = outputs[0] if shared else torch.stack(outputs)
        self.depths, self.hidden_size = weights[0].shape[:2]
        self.vocab_size = output.shape[-2]
        source.require_width(self.hidden_size)
        self._weights, self._biases, (self._output,) = (
            [part.to(self.device, self._dtype) for part in parts]
            for parts in (weights, biases, [output])
        )

    def _rows(self, feeds: Sequence[Feed]) -> Tensor:
        most = max(feed.rows for feed in feeds)
        states = features_of(feeds, self.device, self._dtype)[:, -1]
        found = residual(
            states, [w[:most] for w in self._weights], [b[:most] for b in self._biases]
        )
        if self._output.dim() == 2:
            logits = linear(found, self._output)
        else:
            logits = found.bmm(self._output[:most].transpose(1, 2))
        by_feed = logits.transpose(0, 1).flatten(0, 1)
        if all(feed.rows == most for feed in feeds):
            return by_feed
        wanted = [i * most + row for i, feed in enumerate(feeds) for row in range(feed.rows)]
        return by_feed[torch.tensor(wanted).to(self.device, non_blocking=True)]


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


def _sorted(
    tensors: dict[str, Tensor], files: HeadFiles
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Weights [K, width, width] and biases [K, 1, width] of each layer, and the output matrices.

    Raises:
        StartupError: they are no Medusa's.
    """
    blocks: dict[tuple[int, int, str], Tensor] = {}
    outputs: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if named := _BLOCK.fullmatch(name):
            blocks[int(named[1]), int(named[2]), named[3]] = tensor
        elif named := _OUTPUT.fullmatch(name):
            outputs[int(named[1])] = tensor
        elif name == "lm_head.weight":
            outputs[0] = tensor
        elif named := _AUTHORS.fullmatch(name):
            if ".linear." in name:
                blocks[int(named[1]), int(named[2]), named[3]] = tensor
            else:
                outputs[int(named[1])] = tensor
    heads = 1 + max((head for head, _, _ in blocks), default=-1)
    layers = 1 + max((layer for _, layer, _ in blocks), default=-1)
    grid = [[blocks.get((k, layer, "weight")) for k in range(heads)] for layer in range(layers)]
    if not grid or any(part is None for row in grid for part in row):
        raise StartupError(
            f"the head {files.path} has not Medusa's weights: looked for HEAD.LAYER.linear.weight"
            " and for blocks.HEAD.layers.LAYER.weight"
        )
    weights = [torch.stack([part for part in row if part is not None]) for row in grid]
    width = weights[0].shape[-1]
    if any(weight.shape[1:] != (width, width) for weight in weights) or sorted(outputs) not in (
        [],
        [0],
        list(range(heads)),
    ):
        raise StartupError(f"the head {files.path}: its weights have not Medusa's shapes")
    none = weights[0].new_zeros(width)
    biases = [
        torch.stack([blocks.get((k, layer, "bias"), none) for k in range(heads)])[:, None]
        for layer in range(layers)
    ]
    return weights, biases, [outputs[k] for k in sorted(outputs)]
