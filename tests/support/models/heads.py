"""Tiny heads with random weights for a random target, in their authors' layouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandem.drafting.heads.head import OfHead
from tandem.drafting.methods import METHODS
from tandem.inference.heads.files import HeadFiles
from tandem.inference.heads.head import Head, HeadSource
from tandem.inference.heads.load import FAMILIES
from tandem.inference.kv.size import Room

HEADS = 3
_ROOM = Room(4096, 4096)


# Drafts as `medusa` does.
MTP = "mtp"


def family_of(method: str) -> str:
    """The recipe that drafts by such a head."""
    return "medusa" if method == MTP else method


def is_head(method: str) -> bool:
    """Whether a method drafts by a head."""
    return issubclass(METHODS[method], OfHead)


def random_medusa(width: int, vocab_size: int, layers: int = 1) -> dict[str, Tensor]:
    """Weights under the names of the authors' files."""
    tensors: dict[str, Tensor] = {}
    for head in range(HEADS):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(width, width) / width**0.5
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(width) / 4
        tensors[f"{head}.{layers}.weight"] = torch.randn(vocab_size, width) / 2
    return tensors


def random_mtp(width: int) -> dict[str, Tensor]:
    """A decoder layer for each head, under the names of our own training."""
    tensors: dict[str, Tensor] = {}
    for head in range(HEADS):
        layer = {n: t for n, t in random_eagle(width).items() if n.startswith("layers.")}
        layer |= {"layers.0.input_layernorm.weight": torch.rand(width) + 0.5}
        tensors |= {n.replace("layers.0", f"blocks.{head}"): t for n, t in layer.items()}
    return tensors


def random_hydra(width: int, vocab_size: int, *, prefix: bool = False) -> dict[str, Tensor]:
    """The same of Hydra; with a prefix layer Hydra++. The embedding is the target's."""
    tensors: dict[str, Tensor] = {}
    for head in range(HEADS):
        wide, at = (2 + head) * width, f"hydra_mlp.{head}"
        for part in ("linear", "res_connection"):
            tensors[f"{at}.1.{part}.weight"] = torch.randn(width, wide) / width**0.5
            tensors[f"{at}.1.{part}.bias"] = torch.randn(width) / 4
        tensors[f"{at}.3.linear.weight"] = torch.randn(width, width) / width**0.5
        tensors[f"{at}.3.linear.bias"] = torch.randn(width) / 4
        tensors[f"hydra_lm_head.{head}.1.weight"] = torch.randn(vocab_size, width) / 2
    if prefix:
        layer = {n: t for n, t in random_eagle(width).items() if n.startswith("layers.")}
        layer |= {"layers.0.input_layernorm.weight": torch.rand(width) + 0.5}
        layer |= {"norm.weight": torch.rand(width) + 0.5}
        tensors |= {f"prefix_embeding_layer.{name}": tensor for name, tensor in layer.items()}
    return tensors


def random_eagle(width: int) -> dict[str, Tensor]:
    """Weights under the names of the authors' files: embedding and output are the target's."""
    inner, at = 2 * width, "layers.0"
    shapes = {
        "fc.weight": (width, 2 * width),
        **{f"{at}.self_attn.{part}_proj.weight": (width, width) for part in "qkvo"},
        f"{at}.mlp.gate_proj.weight": (inner, width),
        f"{at}.mlp.up_proj.weight": (inner, width),
        f"{at}.mlp.down_proj.weight": (width, inner),
    }
    tensors = {name: torch.randn(shape) / 2 for name, shape in shapes.items()}
    return {**tensors, f"{at}.post_attention_layernorm.weight": torch.ones(width)}


def random_eagle_3(
    width: int, vocab_size: int, own_ids: Sequence[int], *, head_norms: bool = False
) -> dict[str, Tensor]:
    """The same of EAGLE-3, with a vocabulary of its own.

    Args:
        width: of states.
        vocab_size: of the target.
        own_ids: the target's ids that the head knows.
        head_norms: whether queries and keys are normed, as Qwen3's.
    """
    at = "layers.0"
    tensors = random_eagle(width) | {
        "fc.weight": torch.randn(width, 3 * width) / 2,
        **{f"{at}.self_attn.{part}_proj.weight": torch.randn(width, 2 * width) for part in "qkv"},
        f"{at}.input_layernorm.weight": torch.rand(width) + 0.5,
        f"{at}.hidden_norm.weight": torch.rand(width) + 0.5,
        "norm.weight": torch.rand(width) + 0.5,
        "embed_tokens.weight": torch.randn(vocab_size, width),
        "lm_head.weight": torch.randn(len(own_ids), width),
        "d2t": torch.tensor(own_ids) - torch.arange(len(own_ids)),
        "t2d": torch.tensor([token in own_ids for token in range(vocab_size)]),
    }
    if head_norms:
        tensors |= {f"{at}.self_attn.{n}_norm.weight": torch.rand(width // 2) + 0.5 for n in "qk"}
    return tensors


def eagle_config(width: int, vocab_size: int) -> dict[str, Any]:
    """The configuration of such a layer."""
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
    }


def _made(
    method: str, width: int, vocab_size: int, *, plain: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and weights; plain heads have no decoder layer."""
    if method == "eagle":
        return eagle_config(width, vocab_size), random_eagle(width)
    if method == "hydra":
        config = eagle_config(width, vocab_size) | {"hydra_num_heads": HEADS, "hydra_num_layers": 2}
        return config, random_hydra(width, vocab_size, prefix=not plain)
    keys: dict[str, Any] = {"medusa_num_heads": HEADS, "medusa_num_layers": 1}
    if method == MTP:
        return keys | {"layer_config": eagle_config(width, vocab_size)}, random_mtp(width)
    return keys, random_medusa(width, vocab_size)


@dataclass(frozen=True)
class Weights(HeadFiles):
    """A head that is in memory alone."""

    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.weights)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.weights)


def source_of(files: HeadFiles, room: Room = _ROOM, device: str = "cpu") -> HeadSource:
    """A head that needs nothing of its target."""
    return HeadSource(files, None, "", torch.device(device), torch.float32, room)


def random_head(
    method: str,
    model: PreTrainedModel,
    seed: int = 5,
    device: str = "cpu",
    *,
    plain: bool = False,
) -> Head:
    """A head of a method, or `MTP`, for a target; a plain one has no decoder layer."""
    torch.manual_seed(seed)
    own = {"tandem": {"target_layers": model.config.num_hidden_layers}}
    config, weights = _made(method, model.config.hidden_size, model.config.vocab_size, plain=plain)
    if method != "medusa":
        weights["embed_tokens.weight"] = model.get_input_embeddings().weight.detach()
        weights["lm_head.weight"] = model.get_output_embeddings().weight.detach()
    family = family_of(method)
    files = Weights(Path(method), family, {**config, **own}, weights)
    return FAMILIES[family](source_of(files, device=device))


# Of a decoder layer: what does nothing where what reads it is 0.
_READING = tuple(f"{part}_proj.weight" for part in ("q", "k", "v", "gate", "up"))


def blank_weights(
    method: str, embedding: Tensor, output: Tensor, noise: float = 0.0, *, plain: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and weights of a head as training begins: each row is that of the state.

    Args:
        method: a name of the table, or `MTP`.
        embedding: [V, width] of the target.
        output: [V, width] of the target.
        noise: standard deviation of what is added to the weights.
        plain: without a decoder layer, where the method has heads of both kinds.
    """
    vocab_size, width = output.shape
    config, weights = _made(method, width, vocab_size, plain=plain)
    found = {}
    for name, tensor in weights.items():
        if name.endswith(("norm.weight", *_READING)):
            found[name] = torch.ones_like(tensor) if tensor.dim() == 1 else tensor
        elif len(tensor) == width:
            found[name] = torch.zeros_like(tensor)
            if name.endswith("res_connection.weight"):
                found[name][:, :width] = torch.eye(width)
            if name == "fc.weight":  # after a token's embedding
                found[name][:, -width:] = torch.eye(width)
            found[name] += torch.randn_like(tensor) * noise
    found["lm_head.weight"] = output.detach().clone()
    if method in ("hydra", "eagle"):
        found["embed_tokens.weight"] = embedding.detach().clone()
    return config, found


def blank_head(
    method: str, model: PreTrainedModel, noise: float = 0.0, *, plain: bool = True
) -> Head:
    """Such a head of a target."""
    tables = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    config, weights = blank_weights(method, *tables, noise, plain=plain)
    own = {"tandem": {"target_layers": model.config.num_hidden_layers}}
    family = family_of(method)
    files = Weights(Path(method), family, {**config, **own}, weights)
    return FAMILIES[family](source_of(files))


def save_random_head(folder: Path, method: str, target: Path, seed: int = 5) -> Path:
    """Save a head of a method for a target without a tokenizer.

    Args:
        folder: is made.
        method: a name of the table, or `MTP`.
        target: its checkpoint.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    config = json.loads((target / "config.json").read_text())
    keys, weights = _made(method, config["hidden_size"], config["vocab_size"])
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys))
    save_file(weights, folder / "model.safetensors")
    return folder


def save_blank_head(
    folder: Path, method: str, target: Path, seed: int = 4, *, plain: bool = True
) -> Path:
    """Save a head that drafts well enough, and can learn more; see `blank_weights`."""
    model = AutoModelForCausalLM.from_pretrained(target)
    torch.manual_seed(seed)
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    config, weights = blank_weights(method, embedding, output, 0.05, plain=plain)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder
