"""The decoder layer of a head, as `transformers` defines it, over a KV pool of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from tandem.inference.batch.packed import PackedBatch
from tandem.inference.compatibility import max_positions
from tandem.inference.heads.pieces import PieceLayer
from tandem.inference.kv.pool import KVPool
from tandem.inference.passes.torch_llama import LlamaLayer, RMSNorm, Rotations

_KINDS: dict[str, tuple[Any, Any, Any]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, Qwen3RotaryEmbedding),
}


class HeadLayer:
    """One layer of Llama's or Qwen3's kind.

    Attributes:
        width: of its states.
        max_length: positions of its longest sequence.

    Args:
        shape: its configuration.
        tensors: its weights, by their names within the layer, on their device. Without
            `input_layernorm` attention reads the states as they are.
        wide: attention reads twice the width.

    Raises:
        ValueError: it is no such layer.
        RuntimeError: the weights are not those of the configuration.
    """

    def __init__(
        self, shape: Mapping[str, Any], tensors: Mapping[str, Tensor], *, wide: bool = False
    ) -> None:
        kind = str(shape.get("model_type", "llama"))
        if kind not in _KINDS or int(shape.get("num_hidden_layers", 1)) != 1:
            raise ValueError(f"no single layer of {' or '.join(_KINDS)}: {kind}")
        make_config, self._make_layer, make_rotary = _KINDS[kind]
        config = make_config(**{key: value for key, value in shape.items() if key != "model_type"})
        config._attn_implementation = "eager"
        self._config, self._wide = config, wide
        self._normed = "input_layernorm.weight" in tensors
        self.width, self._epsilon = int(config.hidden_size), float(config.rms_norm_eps)
        self.max_length = max_positions(config)
        layer = self._without_weights()
        layer.load_state_dict(tensors, assign=True)
        self._layer = LlamaLayer(layer)
        device = next(iter(tensors.values())).device
        self._rotary = make_rotary(config).to(device)
        self._rotations = Rotations(self._rotary, self.max_length, device)

    def _without_weights(self) -> Any:
        """The layer of `transformers`."""
        with torch.device("meta"):
            layer = self._make_layer(self._config, 0)
            for name in ("q_proj", "k_proj", "v_proj") if self._wide else ():
                old = getattr(layer.self_attn, name)
                new = nn.Linear(2 * self.width, old.out_features, old.bias is not None)
                setattr(layer.self_attn, name, new)
        if not self._normed:
            layer.input_layernorm = None
        return layer

    def __call__(
        self,
        states: Tensor,
        batch: PackedBatch,
        pool: KVPool,
        read: Tensor | None = None,
        number: int = 0,
    ) -> Tensor:
        """[T, width] to [T, width]; see `LlamaLayer`. Keys and values go to the pool, where the
        layer has a number."""
        pool.slots = batch.slots
        # The layer overwrites its states, which may be another feed's.
        found: Tensor = self._layer(
            states.clone(), self._rotations.of(batch), batch, pool, number, read
        )
        return found

    def over_pieces(self, tensors: Mapping[str, Tensor]) -> PieceLayer:
        """The same layer with weights in training."""
        return PieceLayer(self._without_weights(), self._rotary, self._epsilon, tensors)

    def norm(self, weight: Tensor) -> RMSNorm:
        """A norm of its kind."""
        part: Any = nn.Module()
        part.weight = nn.Parameter(weight, requires_grad=False)
        part.variance_epsilon = self._epsilon
        return RMSNorm(part)


def within(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {
        name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)
    }
