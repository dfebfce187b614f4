"""Shapes of the pair, two Llamas, and a training forward pass that is fast on CPUs.

The parameters live in transformers' `LlamaForCausalLM`, so what is saved is what was trained. Its
own forward pass spends most of a CPU's time outside matrix products; `logits` below computes the
same function with fused projections and plain batched products, which `torch.compile` handles well.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.corpus import VOCABULARY

POSITIONS = 8192
END_ID = 0
THETA = 10_000.0
EPSILON = 1e-5

Weights = Mapping[str, Tensor]

# What trains: a core without instructions for bfloat16 takes seven times as long for it.
FAST = (
    torch.bfloat16
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else torch.float32
)


def config(layers: int, width: int, inner: int, heads: int) -> LlamaConfig:
    """The configuration of a Llama with tied embeddings."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=EPSILON,
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )


TARGET = config(layers=5, width=320, inner=960, heads=5)
DRAFTER = config(layers=2, width=160, inner=480, heads=5)


def create(shape: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A freshly initialised model in float32; residual projections start small."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(shape)
    scale = (2 * shape.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(scale)
    return model


def weights(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """The model's parameters by short name, as `logits` reads them."""
    return {name.removeprefix("model."): p for name, p in model.named_parameters()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return (wide * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on x [batch, time, heads, size]."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def angles(time: int, size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine [time, 1, size / 2] of the rotary angles."""
    frequency = THETA ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = torch.outer(torch.arange(time, dtype=torch.float32), frequency)[:, None, :]
    return angle.cos(), angle.sin()


def attention(x: Tensor, qkv: Tensor, out: Tensor, heads: int) -> Tensor:
    """Causal self-attention on x [batch, time, width]."""
    batch, time, width = x.shape
    size = width // heads
    cos, sin = angles(time, size)
    q, k, v = F.linear(x, qkv).view(batch, time, 3, heads, size).unbind(2)
    q = rotate(q * size**-0.5, cos, sin).transpose(1, 2).reshape(-1, time, size)
    k = rotate(k, cos, sin).transpose(1, 2).reshape(-1, time, size)
    v = v.transpose(1, 2).reshape(-1, time, size)
    score = torch.bmm(q, k.transpose(1, 2)).float()
    past = torch.ones(time, time, dtype=torch.bool).tril()
    share = score.masked_fill(~past, -torch.inf).softmax(-1).to(x.dtype)
    mixed = torch.bmm(share, v).view(batch, heads, time, size).transpose(1, 2)
    return F.linear(mixed.reshape(batch, time, width), out)


class Half:
    """The weights of a model in the fast dtype, projections that share an input fused."""

    def __init__(self, w: Weights, shape: LlamaConfig) -> None:
        self.table = w["embed_tokens.weight"].to(FAST)
        self.norm = w["norm.weight"]
        self.layers = [self._layer(w, f"layers.{i}.") for i in range(shape.num_hidden_layers)]

    @staticmethod
    def _layer(w: Weights, at: str) -> dict[str, Tensor]:
        def fuse(block: str, *names: str) -> Tensor:
            parts = [w[f"{at}{block}.{name}_proj.weight"] for name in names]
            return torch.cat(parts).to(FAST)

        return {
            "first": w[f"{at}input_layernorm.weight"],
            "qkv": fuse("self_attn", "q", "k", "v"),
            "out": fuse("self_attn", "o"),
            "second": w[f"{at}post_attention_layernorm.weight"],
            "wide": fuse("mlp", "gate", "up"),
            "down": fuse("mlp", "down"),
        }


def feed_forward(x: Tensor, layer: dict[str, Tensor]) -> Tensor:
    """The gated block of one layer on x [..., width], residual included."""
    gate, up = F.linear(norm(x, layer["second"]), layer["wide"]).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, layer["down"])


def logits(w: Weights, tokens: Tensor, shape: LlamaConfig) -> Tensor:
    """Logits [batch, time, vocabulary] in the fast dtype for tokens [batch, time]."""
    half = Half(w, shape)
    return F.linear(features(half, tokens, shape), half.table)


def features(half: Half, tokens: Tensor, shape: LlamaConfig) -> Tensor:
    """What the head reads [batch, time, width], for tokens [batch, time]."""
    return hidden_states(half, tokens, shape)[-1]


def hidden_states(half: Half, tokens: Tensor, shape: LlamaConfig) -> list[Tensor]:
    """The embedding, each layer's output and what the head reads [batch, time, width]."""
    x = F.embedding(tokens, half.table)
    found = [x]
    for layer in half.layers:
        seen = norm(x, layer["first"])
        x = x + attention(seen, layer["qkv"], layer["out"], shape.num_attention_heads)
        x = feed_forward(x, layer)
        found.append(x)
    return [*found, norm(x, half.norm)]


def decoder_layer(layer: nn.Module, x: Tensor, heads: int) -> Tensor:
    """What a `LlamaDecoderLayer` makes of states [batch, time, width]."""
    part: Any = layer
    own = part.self_attn
    qkv = torch.cat([p.weight for p in (own.q_proj, own.k_proj, own.v_proj)])
    x = x + attention(norm(x, part.input_layernorm.weight), qkv, own.o_proj.weight, heads)
    between = norm(x, part.post_attention_layernorm.weight)
    gated = F.silu(part.mlp.gate_proj(between)) * part.mlp.up_proj(between)
    added: Tensor = part.mlp.down_proj(gated)
    return x + added


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Replace `folder` by a bfloat16 copy of `model`, its generation settings and the tokenizer."""
    half = LlamaForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(bos_token_id=END_ID, eos_token_id=END_ID)
    with replacing(folder) as fresh:
        half.save_pretrained(str(fresh))
        tokenizer.save_pretrained(str(fresh))


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` at the end."""
    fresh = folder.with_name(f".{folder.name}.new")
    stale = folder.with_name(f".{folder.name}.old")
    for leftover in (fresh, stale):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    yield fresh
    for path in fresh.iterdir():
        path.chmod(0o644)
    if folder.exists():
        folder.rename(stale)
    fresh.rename(folder)
    shutil.rmtree(stale, ignore_errors=True)
