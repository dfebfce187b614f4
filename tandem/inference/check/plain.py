"""A model's own rows, and its own noise: how far two plain ways to compute them are apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from tandem.errors import StartupError, Unsupported
from tandem.inference.check.steering import Steering, routers_in
from tandem.inference.check.texts import ProbeTexts
from tandem.inference.compatibility import name_of_model
from tandem.inference.hidden_states import Layers, blocks_of, tapped
from tandem.inference.output import PassOutput

# Differences up to this many times the noise are noise. Over random, embedded and published
# weights, in three dtypes, right passes reach 2.1. A position that is off by one begins at 4.4, a
# scale that is off by a quarter at 4.5.
LIMIT = 3.0
# Where rows are equal in both plain ways, rounding by so much of their size is noise too.
_ROUNDING = {torch.float32: 3e-4}
_PRECISE = "tandem_precise"


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows of one place in the model: behind a layer, or the logits.

    Attributes:
        name: for people.
        rows: [2, n, width] of both texts, by the model's eager attention.
        noise: root mean square by which a row differs in the second plain way; the largest.
    """

    name: str
    rows: Tensor
    noise: float

    @classmethod
    def of(cls, name: str, rows: Tensor, others: Tensor) -> Stage:
        """Compare two plain ways."""
        return cls(name, rows, float(_rms(rows.float() - others.float()).max()))

    def excess(self, places: Tensor, found: Tensor) -> Tensor:
        """[R] differences of rows, in multiples of the largest that noise explains. Above 1 a row
        is another one.

        Args:
            places: [R] of the rows, among the rows of both texts one after the other.
            found: [R, width].
        """
        plain = self.rows.flatten(0, 1).index_select(0, places).float()
        allowed = LIMIT * torch.clamp(self._rounding * _rms(plain), min=self.noise)
        return _rms(plain - found.float()) / allowed.clamp(min=1e-30)

    @property
    def tolerance(self) -> float:
        """The largest difference that noise explains, as a share of the rows' size."""
        return LIMIT * max(self.noise / float(_rms(self.rows.float()).mean()), self._rounding)

    @property
    def _rounding(self) -> float:
        return _ROUNDING.get(self.rows.dtype, torch.finfo(self.rows.dtype).eps)


@dataclass(frozen=True, slots=True)
class Plain:
    """Both texts by the model's own modules.

    Attributes:
        texts: that were fed.
        logits: of all places.
        states: hidden states of the layers that were asked for.
        layers: the embedding, and what each layer gives, if they are compared one by one; if there
            are none, the noise of logits and states is that of all layers together.
        given: [2n, width] what each of these layers, and then each of their routers, read.
    """

    texts: ProbeTexts
    logits: Stage
    states: tuple[Stage, ...] = ()
    layers: tuple[Stage, ...] = ()
    given: tuple[Tensor, ...] = ()


def plain_rows(
    model: PreTrainedModel, texts: ProbeTexts, of_layers: Layers = (), *, by_layer: bool = False
) -> Plain:
    """The rows of both texts by two plain passes: without a cache, with eager attention, then with
    attention in float32.

    Eager attention honours all that a model asks for, such as soft caps.

    Args:
        model: its attention implementation changes.
        texts: to feed.
        of_layers: whose hidden states to give.
        by_layer: whether layers are to be compared one by one. Those of a few models cannot.

    Raises:
        StartupError: the logits are not finite.
        Unsupported: its attention has a feature that this file does not know.
    """
    blocks = blocks_of(model) if by_layer else ()
    steering = Steering(blocks)
    logits, states = _pass(model, "eager", texts, of_layers, steering)
    if not bool(logits.isfinite().all()):
        raise StartupError(f"the model {name_of_model(model)} computes logits that are not finite")
    count = 2 * len(texts.first)
    given = steering.read
    readers = len(blocks) + len(routers_in(blocks))
    if len(given) != readers or any(len(rows) != count for rows in (*given, *steering.stages)):
        blocks, given = (), []  # its layers have another form
        steering = Steering(blocks)
    again = Steering(blocks, given)
    others, other_states = _pass(model, _PRECISE, texts, of_layers, again)
    return Plain(
        texts,
        Stage.of("the logits", logits, others),
        tuple(
            Stage.of(f"hidden states {layer}", *both)
            for layer, *both in zip(of_layers, states, other_states, strict=True)
        ),
        tuple(
            Stage.of(f"layer {number}" if number else "the embedding", *_by_text(*both))
            for number, both in enumerate(zip(steering.stages, again.stages, strict=True))
        ),
        tuple(given),
    )


def difference(expected: PassOutput, found: PassOutput) -> float:
    """By how much rows of two passes of one back end differ: the largest root mean square, of
    logits or of hidden states, as a share of the rows' size; NaN if one is NaN."""
    pairs = [(expected.logits, found.logits)]
    if expected.states is not None and found.states is not None:
        pairs += zip(expected.states.unbind(1), found.states.unbind(1), strict=True)
    shares = [
        _rms(ours.float() - theirs.float()).max() / _rms(ours.float()).mean().clamp(min=1e-30)
        for ours, theirs in pairs
    ]
    return float(torch.stack(shares).max())


def _pass(
    model: PreTrainedModel, attention: str, texts: ProbeTexts, of_layers: Layers, steering: Steering
) -> tuple[Tensor, Sequence[Tensor]]:
    """[2, n, V] logits, and [2, n, width] hidden states of each layer asked for."""
    model.set_attn_implementation(attention)
    tokens = torch.tensor([texts.first, texts.second], device=model.device)
    steering.begin(torch.arange(tokens.numel(), device=model.device))
    with tapped(model, of_layers) as tap, steering.attached():
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        states = [] if tap is None else tap.whole()
    return logits, states


def _by_text(*rows: Tensor) -> Iterator[Tensor]:
    """[2, n, width] of each [2n, width]."""
    return (each.view(2, len(each) // 2, -1) for each in rows)


def _rms(rows: Tensor) -> Tensor:
    """[...] root mean squares of [..., width]."""
    return rows.square().mean(-1).sqrt()


def _precise(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention in float32; arguments and result as `transformers` has them.

    Raises:
        Unsupported: the model needs more.
    """
    for name in ("position_bias", "head_mask"):
        if others.get(name) is not None:
            raise Unsupported(f"attention with {name!r}")
    groups = query.shape[1] // key.shape[1]
    queries, keys, values = (_rounded_otherwise(states) for states in (query, key, value))
    keys, values = (states.repeat_interleave(groups, 1) for states in (keys, values))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = queries @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + attention_mask.float()
    if s_aux is not None:  # attention sinks: a score of each head that takes a share of the weights
        sinks = s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values).to(query.dtype).transpose(1, 2).contiguous(), None


def _rounded_otherwise(states: Tensor) -> Tensor:
    """States in float32 that differ by up to their dtype's rounding, as other kernels' do."""
    eps = torch.finfo(states.dtype).eps
    numbers = torch.Generator(states.device).manual_seed(0)
    factors = torch.empty(states.shape, device=states.device).uniform_(
        1 - eps, 1 + eps, generator=numbers
    )
    return states.float() * factors


AttentionInterface.register(_PRECISE, _precise)
AttentionMaskInterface.register(_PRECISE, eager_mask)
