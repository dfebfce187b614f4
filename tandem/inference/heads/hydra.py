"""Hydra's heads (arXiv 2402.05109): each guesses the token of a depth from a hidden state and the
tokens of the path behind it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tandem.errors import StartupError, first_line
from tandem.inference.batch.packed import PackedBatch, tokens_of
from tandem.inference.feed import Feed, listed
from tandem.inference.heads.files import HeadFiles
from tandem.inference.heads.head import Head, Room, features_of, norm_of, require_width
from tandem.inference.heads.target_parts import TargetParts
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.kv.pool import KVPool
from tandem.inference.kv.size import cache_size
from tandem.inference.passes.torch_llama import LlamaLayer, Rotations

_BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:\d+\.)?weight")
# As the authors spell it.
_PREFIX = "prefix_embeding_layer."


@dataclass(eq=False, slots=True)
class HydraCache(SequenceCache):
    """What a sequence's places are computed from.

    Attributes:
        paths: of the trunk's end and of each branch row: the hidden state, and the embeddings of
            the tokens behind it, [(1 + tokens) * width].
    """

    paths: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class _Block:
    """A layer of a head: R x + SiLU(W x + b); R is the identity but in the first one."""

    weight: Tensor
    bias: Tensor
    kept: Tensor | None
    kept_bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] to [n, width]."""
        kept = x if self.kept is None else linear(x, self.kept, self.kept_bias)
        return kept + silu(linear(x, self.weight, self.bias))


class HydraHead(Head):
    """K heads; the k-th one's row is that of depth k behind a path of k tokens.

    Of a feed of the trunk the newest pair counts, of a feature and the token behind it; with a
    prefix layer (Hydra++) that layer reads all features. One of branch rows has the drawn tokens.
    """

    def __init__(
        self,
        files: HeadFiles,
        target: TargetParts | None,
        tokenizer: str,
        device: str,
        dtype: torch.dtype,
        room: Room,
    ) -> None:
        tensors = files.tensors()
        own = f"{_PREFIX}embed_tokens.weight"
        embedding = tensors.get("embed_tokens.weight", tensors.pop(own, None))
        if embedding is None:
            if target is None:
                raise StartupError(
                    f"the head {files.path} has no embedding: name its target's checkpoint, which"
                    " has it, with TANDEM_DRAFTER_TARGET"
                )
            embedding = target.embedding()
        outputs = {int(m[1]): t for n, t in tensors.items() if (m := _OUTPUT.fullmatch(n))}
        shared = not outputs
        if shared:
            if target is None:
                raise StartupError(
                    f"the head {files.path} has no output matrix: name its target's checkpoint,"
                    " which has it, with TANDEM_DRAFTER_TARGET"
                )
            outputs = {0: target.output()}
        tensors |= {"embed_tokens.weight": embedding, "output": outputs[min(outputs)]}
        super().__init__(files, target, tokenizer, tensors, device, dtype)
        placed = {name: tensor.to(self.device, dtype) for name, tensor in tensors.items()}
        self._embedding: Tensor = placed["embed_tokens.weight"]
        self.vocab_size, self.hidden_size = self._embedding.shape
        require_width(files, self.hidden_size, target)
        self._heads = _blocks_of(placed, files, self.hidden_size)
        self.depths = len(self._heads)
        if not shared and sorted(outputs) != list(range(self.depths)):
            raise StartupError(f"the head {files.path} has {len(outputs)} output matrices")
        self._outputs = [
            placed["output"] if shared else outputs[k].to(self.device, dtype)
            for k in range(self.depths)
        ]
        self._pool: KVPool | None = None
        self._prefix: LlamaLayer | None = None
        if any(name.startswith(f"{_PREFIX}layers.") for name in placed):
            try:
                self._take_prefix(files, placed)
            except (KeyError, RuntimeError, ValueError) as error:
                raise StartupError(
                    f"the head {files.path} has not Hydra's prefix layer: {first_line(error)}"
                ) from error
            self._pool = self._sized(room)

    def _take_prefix(self, files: HeadFiles, tensors: dict[str, Tensor]) -> None:
        """Make Hydra++'s layer over all features."""
        shape = files.config.get("prefix_config", files.config)
        config: Any = LlamaConfig(**{k: v for k, v in shape.items() if k != "model_type"})
        config.vocab_size, config._attn_implementation = self.vocab_size, "eager"
        with torch.device("meta"):
            layer: Any = LlamaDecoderLayer(config, 0)
        at = f"{_PREFIX}layers.0."
        own = {n.removeprefix(at): part for n, part in tensors.items() if n.startswith(at)}
        layer.load_state_dict(own, assign=True)
        self._prefix = LlamaLayer(layer)
        self._prefix_norm = norm_of(tensors[f"{_PREFIX}norm.weight"], config.rms_norm_eps)
        self.max_length = config.max_position_embeddings
        rotary = LlamaRotaryEmbedding(config).to(self.device)
        self._rotations = Rotations(rotary, self.max_length, self.device)

    def _sized(self, room: Room) -> KVPool:
        """A pool for so many positions as there is room for."""
        pool = self._pool = KVPool(1)
        cache = self.reserve(1)
        assert cache is not None
        with torch.inference_mode():
            self._rows([Feed(cache, [0], 1, features=self.no_features())])
        return pool.resized(cache_size(self.device, pool.bytes_per_position, *room))

    @property
    def positions(self) -> int:
        """Of the prefix layer; 0 without one."""
        return 0 if self._pool is None else self._pool.positions

    @property
    def free_positions(self) -> int:
        """Positions that no sequence has reserved."""
        return 0 if self._pool is None else self._pool.free_positions

    def reserve(self, capacity: int, nodes: int = 0) -> HydraCache | None:
        """Room for a sequence; None if there is none now."""
        if self._pool is None:
            nowhere: Any = None
            return HydraCache(nowhere, 0, capacity)
        part = self._pool.reserve(capacity)
        return None if part is None else HydraCache(part.pool, part.start, part.capacity)

    def release(self, cache: SequenceCache) -> None:
        """Give a sequence's room back."""
        if self._pool is not None:
            self._pool.release(cache)

    def _rows(self, feeds: Sequence[Feed]) -> Tensor:
        tokens = self._embedding.index_select(0, tokens_of(feeds, self.device))
        states = iter(self._states([feed for feed in feeds if feed.features is not None]))
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
            found = torch.stack(paths)
            for block in self._heads[depth]:
                found = block(found)
            index = torch.tensor(places[depth]).to(self.device, non_blocking=True)
            rows.index_copy_(0, index, linear(found, self._outputs[depth]))
        return rows

    def _states(self, feeds: Sequence[Feed]) -> Tensor:
        """[B, width] what the heads read of the newest feature of each feed of the trunk."""
        if not feeds:
            return self._embedding[:0]
        features = features_of(feeds, self.device, self._dtype)[:, 0]
        counts = torch.tensor([len(feed.token_ids) for feed in feeds])
        ends: Tensor = (counts.cumsum(0) - 1).to(self.device, non_blocking=True)
        if self._prefix is None:
            return features[ends]
        assert self._pool is not None
        batch = PackedBatch.of(feeds, self.device)
        self._pool.slots = batch.slots
        found = self._prefix(features, self._rotations.of(batch), batch, self._pool, 0)
        normed: Tensor = self._prefix_norm(found[ends])
        return normed


def _blocks_of(tensors: dict[str, Tensor], files: HeadFiles, width: int) -> list[list[_Block]]:
    """The layers of each head.

    Raises:
        StartupError: they are no Hydra's.
    """
    found: dict[int, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        if named := _BLOCK.fullmatch(name):
            layers = found.setdefault(int(named[1]), {})
            layers.setdefault(int(named[2]), {})[f"{named[3]}.{named[4]}"] = tensor
    heads: list[list[_Block]] = []
    for k in range(len(found)):
        blocks = [
            _Block(
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
