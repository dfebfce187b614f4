"""EAGLE's heads: one decoder layer over hidden states of the target and the tokens behind them.

EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858) read the target's last hidden state, EAGLE-3
(arXiv 2503.01840) three of its layers, fused, and has an output matrix of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from tandem.errors import StartupError, first_line
from tandem.inference.batch.packed import PackedBatch
from tandem.inference.compatibility import max_positions
from tandem.inference.feed import Feed, listed
from tandem.inference.heads.files import HeadFiles
from tandem.inference.heads.head import Head, Room, features_of, norm_of, require_width
from tandem.inference.heads.target_parts import TargetParts
from tandem.inference.kv.extents import SequenceCache
from tandem.inference.kv.pool import KVPool
from tandem.inference.kv.size import cache_size
from tandem.inference.passes.torch_llama import LlamaLayer, Rotations

_FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}
# Paths of a draft are at most as long as a request can ask for.
_DEPTHS = 64


@dataclass(eq=False, slots=True)
class EagleCache(SequenceCache):
    """A sequence's pairs of a feature and the token behind it: true ones, then guessed ones.

    Attributes:
        guessed: [1 + branch rows, width] the head's own states of the trunk's end and of each
            branch row: guesses of the target's next feature.
    """

    guessed: Tensor | None = None


class EagleHead(Head):
    """Guesses the target's next hidden state, and from it the next token.

    A feed that extends the trunk has a feature for each token: that of the position before it. One
    of branch rows has none: a row's feature is what the head guessed at its parent.
    """

    depths = _DEPTHS

    def __init__(
        self,
        files: HeadFiles,
        target: TargetParts | None,
        tokenizer: str,
        device: str,
        dtype: torch.dtype,
        room: Room,
    ) -> None:
        tensors = {name.replace("midlayer.", "layers.0."): t for name, t in files.tensors().items()}
        tensors.pop("t2d", None)
        shape = files.layer_config
        fused = self._fused = files.is_fused
        if "embed_tokens.weight" not in tensors:
            tensors["embed_tokens.weight"] = _of(target, files, "embedding").embedding()
        if "lm_head.weight" not in tensors:
            if fused and "d2t" in tensors:
                raise StartupError(f"the head {files.path} has a vocabulary and no lm_head.weight")
            tensors["lm_head.weight"] = _of(target, files, "output matrix").output()
        super().__init__(files, target, tokenizer, tensors, device, dtype)
        self._target = target
        config = self._config_of(files, shape)
        self.reads = files.layers_of(self.target_layers)
        self.max_length = max_positions(config)
        placed = {
            name: part.to(self.device, dtype if part.is_floating_point() else part.dtype)
            for name, part in tensors.items()
        }
        try:
            self._take(files, config, placed)
        except (KeyError, RuntimeError, ValueError) as error:
            raise StartupError(
                f"the head {files.path} has not EAGLE's weights: {first_line(error)}"
            ) from error
        self._pool = self._sized(room)

    def _config_of(self, files: HeadFiles, shape: dict[str, Any]) -> Any:
        known = _FAMILIES.get(shape.get("model_type", "llama"))
        if known is None:
            raise StartupError(
                f"the head {files.path} has a layer of {shape.get('model_type')!r}; known are"
                f" {', '.join(_FAMILIES)}"
            )
        self._layer_of, self._rotary_of = known[1:]
        if int(shape.get("num_hidden_layers", 1)) != 1:
            raise StartupError(f"the head {files.path} has several layers, and EAGLE's has one")
        config = known[0](**{k: v for k, v in shape.items() if k != "model_type"})
        config._attn_implementation = "eager"
        return config

    def _take(self, files: HeadFiles, config: Any, tensors: dict[str, Tensor]) -> None:
        """Make the layer, and the parts around it."""
        self._embedding, output = tensors["embed_tokens.weight"], tensors["lm_head.weight"]
        width = config.hidden_size
        states = len(self.reads) * int(files.config.get("target_hidden_size") or width)
        self.hidden_size = states // len(self.reads)
        require_width(files, self.hidden_size, self._target)
        # Of a vocabulary of its own, the target's ids.
        self._ids = None
        self.vocab_size = len(self._embedding)
        if len(output) != self.vocab_size:
            if "d2t" not in tensors:
                raise ValueError(
                    f"{len(output)} rows of lm_head.weight, {self.vocab_size} of the embedding, and"
                    " no d2t that says which tokens they are"
                )
            here = torch.arange(len(output), device=self.device)
            self._ids = here + tensors["d2t"].to(here.dtype)
            if not 0 <= int(self._ids.min()) <= int(self._ids.max()) < self.vocab_size:
                raise ValueError(f"d2t names tokens beyond the target's {self.vocab_size}")
        self._output = output
        self._fuse = tensors["fc.weight"]
        self._fuse_bias = tensors.get("fc.bias")
        expected = (width, states if self._fused else states + width)
        if tuple(self._fuse.shape) != expected:
            raise ValueError(f"fc.weight is {list(self._fuse.shape)} instead of {list(expected)}")
        with torch.device("meta"):
            layer: Any = self._layer_of(config, 0)
            if self._fused:  # attention reads the token's embedding and the state
                for name in ("q_proj", "k_proj", "v_proj"):
                    old = getattr(layer.self_attn, name)
                    new = nn.Linear(2 * width, old.out_features, old.bias is not None)
                    setattr(layer.self_attn, name, new)
        at = "layers.0."
        own = {n.removeprefix(at): part for n, part in tensors.items() if n.startswith(at)}
        self._token_norm = self._state_norm = self._end_norm = None
        if self._fused:
            self._token_norm = norm_of(own.pop("input_layernorm.weight"), config.rms_norm_eps)
            self._state_norm = norm_of(own.pop("hidden_norm.weight"), config.rms_norm_eps)
            self._end_norm = norm_of(tensors["norm.weight"], config.rms_norm_eps)
        if "input_layernorm.weight" not in own:  # EAGLE's own have none
            layer.input_layernorm = None
        layer.load_state_dict(own, assign=True)
        self._layer = LlamaLayer(layer)
        rotary = self._rotary_of(config).to(self.device)
        self._rotations = Rotations(rotary, self.max_length, self.device)
        self._normed_residual = files.normed_residual
        self._norm_output = bool(files.config.get("norm_output", False))

    def _sized(self, room: Room) -> KVPool:
        """A pool for so many positions as there is room for."""
        pool = self._pool = KVPool(1)
        cache = self.reserve(1)
        assert cache is not None
        probe = Feed(cache, [0], 1, features=self.no_features())
        with torch.inference_mode():
            self._rows([probe])
        positions = cache_size(self.device, pool.bytes_per_position, *room)
        return pool.resized(positions)

    @property
    def positions(self) -> int:
        """That all sequences may hold together."""
        return self._pool.positions

    @property
    def free_positions(self) -> int:
        """Positions that no sequence has reserved."""
        return self._pool.free_positions

    def reserve(self, capacity: int, nodes: int = 0) -> EagleCache | None:
        """Room for a sequence; None if there is none now."""
        part = self._pool.reserve(capacity)
        return None if part is None else EagleCache(part.pool, part.start, part.capacity)

    def release(self, cache: SequenceCache) -> None:
        """Give a sequence's room back."""
        self._pool.release(cache)

    def _rows(self, feeds: Sequence[Feed]) -> Tensor:
        batch = PackedBatch.of(feeds, self.device)
        self._pool.slots = batch.slots
        tokens = self._embedding.index_select(0, batch.token_ids[0])
        states = self._states(feeds)
        rotation = self._rotations.of(batch)
        if self._fused:
            assert self._token_norm is not None
            assert self._state_norm is not None
            normed = self._state_norm(states)
            read = torch.cat((self._token_norm(tokens), normed), -1)
            before = normed if self._normed_residual else states
            found = self._layer(before, rotation, batch, self._pool, 0, read)
        else:
            fused = linear(torch.cat((tokens, states), -1), self._fuse, self._fuse_bias)
            found = self._layer(fused, rotation, batch, self._pool, 0)
        ends = found if self._end_norm is None else self._end_norm(found)
        self._keep(feeds, ends if self._norm_output else found)
        wanted = ends if batch.rows is None else ends.index_select(0, batch.rows)
        logits = linear(wanted, self._output)
        if self._ids is None:
            return logits
        rows = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return rows.index_copy_(1, self._ids, logits)

    def _states(self, feeds: Sequence[Feed]) -> Tensor:
        """[T, width] what the layer reads beside each token: features, and guesses of them."""
        told = [feed for feed in feeds if feed.features is not None]
        parts: dict[int, Tensor] = {}
        if told:
            features = features_of(told, self.device, self._dtype).flatten(1)
            if self._fused:
                features = linear(features, self._fuse, self._fuse_bias)
            counts = [len(feed.token_ids) for feed in told]
            parts |= {
                id(f): part for f, part in zip(told, torch.split(features, counts), strict=True)
            }
        for feed in feeds:
            if feed.features is None:
                cache = feed.cache
                assert isinstance(cache, EagleCache)
                assert cache.guessed is not None
                assert feed.parents
                behind = torch.tensor(feed.parents).to(self.device, non_blocking=True)
                parts[id(feed)] = cache.guessed.index_select(0, behind)
        states = [parts[id(feed)] for feed in feeds]
        return states[0] if len(states) == 1 else torch.cat(states)

    def _keep(self, feeds: Sequence[Feed], found: Tensor) -> None:
        """Grow the feeds' caches, and remember what was guessed behind their tokens."""
        first = 0
        for feed in feeds:
            cache, end = feed.cache, first + len(feed.token_ids)
            assert isinstance(cache, EagleCache)
            if feed.parents:
                assert cache.guessed is not None
                cache.guessed = torch.cat((cache.guessed, found[first:end]))
            else:
                cache.guessed = found[end - 1 : end]
            cache.grow(listed(feed.token_ids), feed.parents)
            first = end


def _of(target: TargetParts | None, files: HeadFiles, part: str) -> TargetParts:
    if target is None:
        raise StartupError(
            f"the head {files.path} has no {part}: name its target's checkpoint, which has it,"
            " with TANDEM_DRAFTER_TARGET"
        )
    return target
