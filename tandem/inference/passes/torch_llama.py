"""The pass of a Llama-like model as a plain list of operators.

`transformers` spends more time between the operators of a small model than in them: modules,
hooks, masks and keyword arguments take about 0.3 ms a layer and 0.4 ms a pass, whatever the
model's width. Families with such layers run through this file instead; all others run through
their own modules. The start compares either with a plain pass.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedModel

from tandem.inference.batch.attention import attend
from tandem.inference.batch.packed import PackedBatch
from tandem.inference.compatibility import max_positions
from tandem.inference.hidden_states import Layers
from tandem.inference.kv.pool import KVPool
from tandem.inference.loading.partial import Sublayers
from tandem.inference.output import PassOutput
from tandem.inference.passes.backend import Pass
from tandem.inference.passes.torch_layout import PlainLinear
from tandem.kernels.layer import gate, turn_and_write

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Positions whose rotations are computed at first; for a longer text, up to the next power of two.
_FIRST_TURNS = 1024


class LlamaPass(nn.Module):
    """Embedding, layers, norm and output matrix. Inference only; takes its weights out of the
    model.

    Args:
        model: one that `fits`; its own layers are empty afterwards.
        of_layers: whose hidden states it can give.

    Attributes:
        blocks: its layers. Those with the same weights share them.
        cycles: how often a group of them is used, one after the other.
    """

    def __init__(self, model: PreTrainedModel, of_layers: Layers = ()) -> None:
        super().__init__()
        self._of_layers = of_layers
        inner: Any = model.model
        self._embedding: Tensor = inner.embed_tokens.weight.detach()
        self._norm = RMSNorm(inner.norm)
        self.head = PlainLinear(model.lm_head.weight, model.lm_head.bias)
        del model.lm_head  # its weights may get another layout
        self._rotations = Rotations(
            inner.rotary_emb, max_positions(model.config), self._embedding.device
        )
        self.blocks = nn.ModuleList()
        self._steps: list[_Step] = []
        keys = [_weights_of(layer) for layer in inner.layers]
        group = list(dict.fromkeys(keys))
        times = len(keys) // len(group)
        self.cycles = times if keys == group * times else 1
        made: dict[Hashable, LlamaLayer] = {}
        attentions = 0
        for key in keys:  # one by one, so that no two copies of the model exist
            layer = made[key].twin() if key in made else LlamaLayer(inner.layers[0])
            made[key] = layer
            self.blocks.append(layer)
            self._steps.append(_Step(len(self.blocks), layer, attentions))
            attentions += inner.layers[0].self_attn is not None
            del inner.layers[0]

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model is of a supported family, without special features."""
        config: Any = model.config
        if config.model_type not in _FAMILIES or config.hidden_act != "silu":
            return False
        if config.model_type == "llama" and getattr(config, "sliding_window", None) is not None:
            return False  # its modules leave the window to the cache
        if config.rope_parameters["rope_type"] in ("dynamic", "longrope"):
            return False  # frequencies that depend on the text's length
        inner: Any = model.model
        parts = [part for layer in inner.layers for part in _projections(layer)]
        if not all(_plain(part, nn.Linear) for part in (model.lm_head, *parts)):
            return False
        if not _plain(inner.embed_tokens, nn.Embedding):
            return False
        cos, _ = inner.rotary_emb(inner.norm.weight, torch.zeros(1, 1, device=model.device))
        attention = next(filter(None, (layer.self_attn for layer in inner.layers)))
        return bool(cos.shape[-1] == attention.head_dim)

    def forward(self, batch: PackedBatch, pool: KVPool) -> PassOutput:
        """The rows that the batch asks for; keys and values go to the pool."""
        # Taken at once, since layers add to the states in place.
        found: dict[int, Tensor] = {}
        begun, resumed = 0, batch.resumed
        if resumed is None:
            states = self._embedded(batch)
            if batch.states is not None and 0 in self._of_layers:
                found[0] = states.index_select(0, batch.states)
        else:
            begun = resumed.exit
            lower = self._embedded(resumed.rest)
            states = resumed.joined(
                self._through(self._steps[:begun], lower, resumed.rest, pool, {})
            )
        states = self._through(self._steps[begun:], states, batch, pool, found)
        logits = self._rows(states, batch)
        if batch.states is None:
            return PassOutput(logits)
        if len(self.blocks) + 1 in self._of_layers:
            found[len(self.blocks) + 1] = self._norm(states.index_select(0, batch.states))
        return PassOutput(logits, torch.stack([found[layer] for layer in self._of_layers], 1))

    def part(self, sublayers: Sequence[Sublayers], exit_: int = 0) -> Pass:
        """The pass of some sublayers alone, with the same weights and in the same pool.

        Args:
            sublayers: that are computed, of the first layers.
            exit_: gives the states [T, 1, width] after the last of these layers too; 0 does not.
        """
        steps = [
            _Step(step.number, step.layer.part(*own), step.place)
            for step, own in zip(self._steps, sublayers, strict=False)
        ]

        def compute(batch: PackedBatch, pool: KVPool) -> PassOutput:
            states = self._through(steps, self._embedded(batch), batch, pool, {})
            return PassOutput(self._rows(states, batch), states[:, None] if exit_ else None)

        return compute

    def group(self, first: int, last: int) -> LayerGroup:
        """Layers from `first` up to `last`, counted from 0, as a pass from states to states."""
        steps = self._steps[first:last]

        def compute(states: Tensor, batch: PackedBatch, pool: KVPool) -> Tensor:
            return self._through(steps, states, batch, pool, {})

        return compute

    def embedded(self, token_ids: Tensor) -> Tensor:
        """[T, E] what the first layer reads, of [T]."""
        return self._embedding.index_select(0, token_ids)

    def logits(self, states: Tensor) -> Tensor:
        """[R, V] after states [R, E]."""
        rows: Tensor = self.head(self._norm(states))
        return rows

    def foresee(self, longest: int) -> None:
        """Compute the rotations of this many positions now."""
        self._rotations.reach(longest)

    def _embedded(self, batch: PackedBatch) -> Tensor:
        return self.embedded(batch.token_ids[0])

    def _through(
        self,
        steps: Sequence[_Step],
        states: Tensor,
        batch: PackedBatch,
        pool: KVPool,
        found: dict[int, Tensor],
    ) -> Tensor:
        """[T, E] to [T, E] by some layers; the states asked for are noted in `found`."""
        pool.slots = batch.slots
        rotation = self._rotations.of(batch)
        for number, layer, place in steps:
            states = layer(states, rotation, batch, pool, place)
            if batch.states is not None and number in self._of_layers:
                found[number] = states.index_select(0, batch.states)
        return states

    def _rows(self, states: Tensor, batch: PackedBatch) -> Tensor:
        """[R, V] logits of the rows that a batch asks for."""
        return self.logits(states if batch.rows is None else states.index_select(0, batch.rows))


class LayerGroup(Protocol):
    """Some layers of a pass."""

    def __call__(self, states: Tensor, batch: PackedBatch, pool: KVPool) -> Tensor:
        """[T, E] to [T, E]; the states are overwritten, keys and values go to the pool."""


class _Step(NamedTuple):
    """A layer of a pass: its number, from 1, and its place in the pool."""

    number: int
    layer: LlamaLayer
    place: int


class Rotations:
    """The rotations of positions, computed once.

    Args:
        rotary: the model's module that computes them.
        max_positions: of a text.
        device: where they are.
    """

    def __init__(self, rotary: Any, max_positions: int, device: torch.device) -> None:
        self._rotary = rotary
        self._max_positions = max_positions
        # [positions, 1, D/2] complex64: the rotations of a head's pairs.
        self._turns = torch.empty(0, dtype=torch.complex64, device=device)
        # Those of fewer positions: captured passes go on reading them.
        self._outgrown: list[Tensor] = []

    def of(self, batch: PackedBatch) -> Tensor:
        """[T, 1, D/2] complex64: the rotation of each token's position."""
        self.reach(max(segment.reach for segment in batch.segments))
        turns: Tensor = self._turns.index_select(0, batch.positions[0])
        return turns

    def reach(self, longest: int) -> None:
        """Have the rotations of this many positions."""
        if longest > len(self._turns):
            count = max(_FIRST_TURNS, 2 ** (longest - 1).bit_length())
            if longest <= self._max_positions:
                count = min(count, self._max_positions)
            positions = torch.arange(count, device=self._turns.device)
            like = torch.empty(0, dtype=torch.float32, device=self._turns.device)
            cos, sin = self._rotary(like, positions[None])
            self._outgrown.append(self._turns)
            half = cos.shape[-1] // 2
            self._turns = torch.complex(cos[0, :, :half], sin[0, :, :half])[:, None]


class RMSNorm:
    """x / rms(x) * weight, in float32, with as few operators as possible.

    Attributes:
        weight: [E] float32, or one for each head.
    """

    def __init__(self, norm: Any) -> None:
        self.weight: Tensor = norm.weight.detach().float()
        self.eps: float = norm.variance_epsilon
        self._start = self.weight.new_full((), self.eps)
        # A device's kernel takes weights of the states' own dtype.
        self._own: Tensor = norm.weight.detach()

    def __call__(self, states: Tensor) -> Tensor:
        """[..., E] to [..., E]."""
        if states.is_cuda and self.weight.dim() == 1:
            # One kernel; on a CPU this would be a dozen operators.
            return rms_norm(states, states.shape[-1:], self._own, self.eps)
        norm = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._start, norm, norm, value=1 / states.shape[-1]).rsqrt_()
        return (states * self.weight).mul_(scale).to(states.dtype)


class LlamaLayer(nn.Module):
    """Attention and MLP; projections of the same input are fused into one product.

    Args:
        layer: of `transformers`; without `input_layernorm` attention reads the states as they are.
            Its attention or its MLP may be None (`tandem.inference.loading.partial`).
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self._attends = layer.self_attn is not None
        self._computes = layer.mlp is not None
        if self._attends:
            self._take_attention(layer)
        if self._computes:
            self._between = RMSNorm(layer.post_attention_layernorm)
            self.gate_up = _fused(layer.mlp.gate_proj, layer.mlp.up_proj)
            self.down = PlainLinear(layer.mlp.down_proj.weight, layer.mlp.down_proj.bias)

    def part(self, attends: bool, computes: bool) -> LlamaLayer:
        """The layer with some of its sublayers, whose weights it shares."""
        own = copy.copy(self)
        own._attends, own._computes = self._attends and attends, self._computes and computes
        return own

    def twin(self) -> LlamaLayer:
        """The layer once more, with the same weights."""
        return copy.deepcopy(self, {id(own): own for own in self.children()})

    def _take_attention(self, layer: Any) -> None:
        attention = layer.self_attn
        head_dim = self._head_dim = attention.head_dim
        self._key_heads = attention.k_proj.out_features // head_dim
        self._query_heads = attention.q_proj.out_features // head_dim
        self._scaling: float = attention.scaling
        self._window = _window_of(attention)
        before = layer.input_layernorm
        self._before = None if before is None else RMSNorm(before)
        self._head_norm = None
        if hasattr(attention, "q_norm"):
            self._head_norm = _head_norm(attention, self._query_heads, self._key_heads)
        self.qkv = _fused(
            _paired(attention.q_proj, head_dim),
            _paired(attention.k_proj, head_dim),
            attention.v_proj,
        )
        self.out = PlainLinear(attention.o_proj.weight, attention.o_proj.bias)

    def forward(
        self,
        states: Tensor,
        rotation: Tensor,
        batch: PackedBatch,
        pool: KVPool,
        index: int,
        read: Tensor | None = None,
    ) -> Tensor:
        """[T, E] to [T, E].

        Args:
            states: of each token; overwritten.
            rotation: see `Rotations`.
            batch: the tokens.
            pool: of keys and values.
            index: of the layer in the pool, which is the number of attentions before it.
            read: [T, *] what attention reads; None for the states after the norm.
        """
        if self._attends:
            states = self._attend(states, rotation, batch, pool, index, read)
        if not self._computes:
            return states
        found = self.gate_up(self._between(states))
        if batch.tiles is not None:
            return self.down.plus(states, gate(found))
        first, second = found.chunk(2, -1)
        return self.down.plus(states, silu(first).mul_(second))

    def _attend(
        self,
        states: Tensor,
        rotation: Tensor,
        batch: PackedBatch,
        pool: KVPool,
        index: int,
        read: Tensor | None,
    ) -> Tensor:
        if read is None:
            read = states if self._before is None else self._before(states)
        heads = self.qkv(read).view(len(states), -1, self._head_dim)
        if batch.tiles is not None:
            own = heads[:, self._query_heads :].transpose(0, 1).tensor_split(2)
            keys, values = pool.layer(index, *own)
            norm = self._head_norm
            gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            query = turn_and_write(
                heads, rotation, batch.slots, keys, values, self._query_heads, gain, eps
            ).transpose(0, 1)
        else:
            turned, value = heads.tensor_split((-self._key_heads,), 1)
            if self._head_norm is not None:
                turned = self._head_norm(turned)
            turned = _turn(turned, rotation).transpose(0, 1)
            query, key = turned.tensor_split((self._query_heads,))
            keys, values = pool.write(index, key, value.transpose(0, 1))
        if batch.choices:
            batch.show(index, query, keys, values)
        seen = attend(batch, query, keys, values, self._scaling, self._window)
        return self.out.plus(states, seen.flatten(1))


def _turn(heads: Tensor, rotation: Tensor) -> Tensor:
    """Rotate heads [T, H, D] by [T, 1, D/2]; in place if they are float32."""
    floats = heads.float()
    torch.view_as_complex(floats.view(*heads.shape[:2], -1, 2)).mul_(rotation)
    return floats.to(heads.dtype)


def _weights_of(layer: Any) -> Hashable:
    """Equal for layers with the same weights."""
    return tuple((name, id(weight)) for name, weight in layer.named_parameters())


def _projections(layer: Any) -> Iterator[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    if attention is not None:
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    if mlp is not None:
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _plain(part: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of exactly this class, and not quantised, adapted or wrapped."""
    if type(part) is not kind or "forward" in vars(part):
        return False
    return type(part.weight) is nn.Parameter


def _window_of(attention: Any) -> int | None:
    """Positions that a token sees; None for all. Only Mistral keeps it in its configuration."""
    holder = attention.config if attention.config.model_type == "mistral" else attention
    window: int | None = getattr(holder, "sliding_window", None)
    return window


def _head_norm(attention: Any, query_heads: int, key_heads: int) -> RMSNorm:
    """One norm for queries and keys: its weight is [Hq + H, D]."""
    norm, other = RMSNorm(attention.q_norm), RMSNorm(attention.k_norm)
    query, key = (_pairs(part.weight, len(part.weight)) for part in (norm, other))
    norm.weight = torch.cat((query.expand(query_heads, -1), key.expand(key_heads, -1)))
    return norm


def _fused(*parts: nn.Linear | PlainLinear) -> PlainLinear:
    """One layer in place of several with the same input."""
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    weight = torch.cat([part.weight.detach() for part in parts])
    return PlainLinear(weight, torch.cat(biases) if biases else None)


def _paired(part: nn.Linear, head_dim: int) -> PlainLinear:
    """The layer with its output in the order of `_pairs`."""
    bias = None if part.bias is None else _pairs(part.bias, head_dim)
    return PlainLinear(_pairs(part.weight, head_dim), bias)


def _pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Rows [H * D, ...] reordered so that the two numbers that RoPE rotates together are adjacent.

    `transformers` rotates the i-th number of a head's first half with the i-th of its second.
    Queries and keys are only multiplied with each other, so any common order gives the same result.
    """
    halves = rows.detach().view(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).flatten(0, 2)
