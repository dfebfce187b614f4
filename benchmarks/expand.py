"""Function-preserving expansion: a Llama checkpoint in a larger shape with the same logits.

    python -m benchmarks.expand --layers 12 --width 768 --heads 12 --mlp 2176 --out DIR

The result costs as much as any model of that shape and gives the source's logits, so timings come
with a realistic acceptance. The added parts compute with random, dense weights, but their results
are discarded: extra layers have zero output projections, extra channels of the residual stream get
zeros, extra heads and MLP units have zero output columns. Heads keep their size, and with it RoPE's
frequencies and the scale of attention.

RMSNorm takes its mean over the wider stream, of which only the share old/new is in use, so the mean
of squares shrinks by that share. To compensate, the norm weights shrink by its square root, and
epsilon, which is added to the mean, by the share itself. The norm weights are stored in float32,
since the scaled values are not exact in bfloat16; loaded in bfloat16 they round like all others.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

_COPIED = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "*.jinja")


@dataclass(frozen=True)
class Shape:
    """The shape to expand a checkpoint to; no part may be smaller than the source's.

    Attributes:
        layers: decoder layers.
        width: channels of the residual stream.
        heads: query heads, each as wide as the source's.
        kv_heads: key and value heads; divides `heads`.
        mlp: units of each MLP.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int


class Expansion:
    """Places the source's weights in tensors of the new shape.

    Args:
        source: a Llama, with weights in the dtype on disk.
        shape: of the result.
        seed: of the added weights.
        device: that draws them; a GPU draws billions in a second.

    Raises:
        ValueError: the source is no plain Llama, or does not fit the shape.
    """

    def __init__(
        self, source: PreTrainedModel, shape: Shape, seed: int = 0, device: str = "cpu"
    ) -> None:
        self._config = source.config
        self._weights: dict[str, Tensor] = source.state_dict()
        self._shape = shape
        self._generator = torch.Generator(device).manual_seed(seed)
        self._check()
        self._q_heads, self._kv_heads = self._place_heads()
        self._share: float = self._config.hidden_size / shape.width

    def _check(self) -> None:
        config, shape = self._config, self._shape
        if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
            raise ValueError(f"only Llama without biases can be expanded, not {config.model_type}")
        if shape.heads % shape.kv_heads:
            raise ValueError(f"{shape.kv_heads} kv heads do not divide {shape.heads} heads")
        # transformers requires this, although the heads' size is a separate setting.
        if shape.width % shape.heads:
            raise ValueError(f"{shape.heads} heads do not divide width {shape.width}")
        sizes = {
            "layers": (config.num_hidden_layers, shape.layers),
            "width": (config.hidden_size, shape.width),
            "heads": (config.num_attention_heads, shape.heads),
            "mlp": (config.intermediate_size, shape.mlp),
        }
        for name, (old, new) in sizes.items():
            if new < old:
                raise ValueError(f"{name} {new} is smaller than the source's {old}")

    def _place_heads(self) -> tuple[list[int], list[int]]:
        """The new place of each old head, and the old kv head that each new one copies.

        A query head must keep its keys and values. Groups may grow, shrink or stay: the query heads
        of an old kv head fill as many new groups as they need, each with a copy of that kv head.

        Returns:
            The new place of each old query head; for the first new kv heads, the old one to copy.
        """
        group = self._config.num_attention_heads // self._config.num_key_value_heads
        new_group = self._shape.heads // self._shape.kv_heads
        places: list[int] = []
        copied: list[int] = []
        for kv_head in range(self._config.num_key_value_heads):
            for start in range(0, group, new_group):
                first = len(copied) * new_group
                places += range(first, first + min(new_group, group - start))
                copied.append(kv_head)
        if len(copied) > self._shape.kv_heads:
            raise ValueError(f"the source's heads need {len(copied)} kv heads or more")
        return places, copied

    def config(self) -> Any:
        """The expanded checkpoint's configuration."""
        config, shape = type(self._config)(**self._config.to_dict()), self._shape
        config.num_hidden_layers = shape.layers
        config.hidden_size = shape.width
        config.num_attention_heads = shape.heads
        config.num_key_value_heads = shape.kv_heads
        config.head_dim = self._config.head_dim
        config.intermediate_size = shape.mlp
        config.rms_norm_eps = self._config.rms_norm_eps * self._share
        return config

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The expanded checkpoint's tensors."""
        width, old_width = self._shape.width, self._config.hidden_size
        table = self._weights["model.embed_tokens.weight"]
        # The new channels are zero from the start, so no norm can amplify them.
        yield "model.embed_tokens.weight", _widened(table, width)
        yield "model.norm.weight", self._norm(self._weights["model.norm.weight"])
        if not self._config.tie_word_embeddings:
            head = self._random(len(table), width)
            head[:, :old_width] = self._weights["lm_head.weight"]
            yield "lm_head.weight", head
        for layer in range(self._shape.layers):
            prefix = f"model.layers.{layer}."
            for name, tensor in self._layer(prefix, layer < self._config.num_hidden_layers):
                yield prefix + name, tensor

    def _layer(self, prefix: str, is_old: bool) -> Iterator[tuple[str, Tensor]]:
        """One layer; a new one is random except for its output projections, which are zero."""
        shape, size = self._shape, self._config.head_dim
        old_width, old_mlp = self._config.hidden_size, self._config.intermediate_size
        q_rows = _rows_of(self._q_heads, size)
        kv_rows, kv_sources = (
            _rows_of(heads, size) for heads in (range(len(self._kv_heads)), self._kv_heads)
        )
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            old_norm = self._weights[prefix + name] if is_old else torch.ones(old_width)
            yield name, self._norm(old_norm)
        inputs = (
            ("self_attn.q_proj.weight", shape.heads * size, q_rows, slice(None)),
            ("self_attn.k_proj.weight", shape.kv_heads * size, kv_rows, kv_sources),
            ("self_attn.v_proj.weight", shape.kv_heads * size, kv_rows, kv_sources),
            ("mlp.gate_proj.weight", shape.mlp, slice(old_mlp), slice(None)),
            ("mlp.up_proj.weight", shape.mlp, slice(old_mlp), slice(None)),
        )
        for name, rows, places, sources in inputs:
            tensor = self._random(rows, shape.width)
            if is_old:
                tensor[places, :old_width] = self._weights[prefix + name][sources]
            yield name, tensor
        outputs = (
            ("self_attn.o_proj.weight", shape.heads * size, q_rows),
            ("mlp.down_proj.weight", shape.mlp, slice(old_mlp)),
        )
        for name, columns, places in outputs:
            tensor = torch.zeros(shape.width, columns, dtype=self._dtype)
            if is_old:
                tensor[:old_width, places] = self._weights[prefix + name]
            yield name, tensor

    @property
    def _dtype(self) -> torch.dtype:
        return self._weights["model.embed_tokens.weight"].dtype

    def _norm(self, weight: Tensor) -> Tensor:
        """A norm's weight; its values for the new channels do not matter, as these are 0."""
        wider = torch.ones(self._shape.width)
        wider[: len(weight)] = weight.float()
        return wider * math.sqrt(self._share)

    def _random(self, rows: int, columns: int) -> Tensor:
        spread: float = self._config.initializer_range
        device = self._generator.device
        drawn = torch.randn(rows, columns, generator=self._generator, device=device) * spread
        return drawn.to("cpu", self._dtype)


def _widened(rows: Tensor, width: int) -> Tensor:
    wider = rows.new_zeros(len(rows), width)
    wider[:, : rows.shape[1]] = rows
    return wider


def _rows_of(heads: list[int] | range, size: int) -> Tensor:
    """The rows of a projection that belong to heads."""
    return (torch.tensor(list(heads))[:, None] * size + torch.arange(size)).flatten()


def expand(source: Path, shape: Shape, out: Path, seed: int = 0, device: str = "cpu") -> int:
    """Write the expansion of a checkpoint folder.

    Args:
        source: folder of a Llama checkpoint.
        shape: of the result.
        out: folder to make.
        seed: of the weights that have no effect.
        device: see `Expansion`.

    Returns:
        Its number of parameters.

    Raises:
        ValueError: the source is no plain Llama, or does not fit the shape.
    """
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    expansion = Expansion(model, shape, seed, device)
    out.mkdir(parents=True, exist_ok=True)
    tensors = dict(expansion.weights())
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    expansion.config().save_pretrained(out)
    for pattern in _COPIED:
        for path in source.glob(pattern):
            shutil.copy(path, out / path.name)
    return sum(tensor.numel() for tensor in tensors.values())


def main() -> None:
    """Expand a checkpoint as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("layers", "width", "heads", "mlp"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--source", type=Path, default=Path("models/target"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the weights without effect")
    args = parser.parse_args()
    shape = Shape(args.layers, args.width, args.heads, args.kv_heads or args.heads, args.mlp)
    try:
        parameters = expand(args.source, shape, args.out, args.seed)
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.out}: {parameters / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
