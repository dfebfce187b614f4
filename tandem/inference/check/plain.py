"""A model's own rows, and its own noise: how far two plain ways to compute them are apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
# weights, in three dtypes, right passes reach 2. A position that is off by one begins at 7, a scale
# that is off by a quarter at 5.8.
LIMIT = 3.0
# Where rows are equal in both plain ways, rounding by so much of their size is noise too.
_ROUNDING = {torch.float32: 3e-4}
# Two plain ways that differ by more, as a share of a row's size, are no measure of anything.
_MOST_NOISE = {torch.float32: 3e-3}
_MOST_NOISE_OF_NARROW = 0.3
# A row's size, so that rows of zeros divide nothing by zero.
_NOTHING = 1e-30
_PRECISE = "tandem_precise"


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows of one place in the model: after a layer, or the logits.

    Attributes:
        name: for people.
        rows: [2, n, width] of both texts, by the model's eager attention.
        noise: by how much a row differs in the second plain way, as a share of its size: the
            largest, by root mean squares and by largest elements.
    """

    name: str
    rows: Tensor
    noise: tuple[float, float]

    @classmethod
    def of(cls, name: str, rows: Tensor, others: Tensor) -> Stage:
        """Compare two plain ways.

        Raises:
            Unsupported: they differ by far more than rounding.
        """
        ours, theirs = _shown(rows), _shown(others)
        shares = _sizes(ours - theirs) / _sizes(ours).clamp(min=_NOTHING)
        mean, largest = shares.flatten(0, -2).amax(0).tolist()
        stage = cls(name, rows, (mean, largest))
        if not mean <= _MOST_NOISE.get(rows.dtype, _MOST_NOISE_OF_NARROW):
            raise Unsupported(
                f"two plain ways to compute it differ by {mean:.2g} of the size of {name}, which"
                " leaves nothing to compare a batch with"
            )
        return stage

    def excess(self, places: Tensor, found: Tensor) -> Tensor:
        """[R] differences of rows, in multiples of the largest that noise explains. Above 1 a row
        is another one.

        Args:
            places: [R] of the rows, among the rows of both texts one after the other.
            found: [R, width].
        """
        plain = _shown(self.rows.flatten(0, 1).index_select(0, places))
        noise = torch.tensor(self.noise, device=plain.device).clamp(min=self._rounding)
        allowed = LIMIT * noise * _sizes(plain)
        return (_sizes(plain - _shown(found)) / allowed.clamp(min=_NOTHING)).amax(-1)

    @property
    def tolerance(self) -> float:
        """The largest difference that noise explains, as a share of a row's size."""
        return LIMIT * max(self.noise[0], self._rounding)

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
    """The rows of both texts by two plain passes without a cache. The second one computes attention
    in float32, from queries, keys and values that are rounded otherwise.

    Eager attention honours all that a model asks for, such as soft caps.

    Args:
        model: its attention implementation changes.
        texts: to feed.
        of_layers: whose hidden states to give.
        by_layer: whether layers are to be compared one by one. Those of a few models cannot.

    Raises:
        StartupError: the logits are not finite.
        Unsupported: two plain passes differ by more than rounding.
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
    if torch.equal(logits, others):  # it computes attention in its own way alone
        with _other_embeddings(model):
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


@contextmanager
def _other_embeddings(model: PreTrainedModel) -> Iterator[None]:
    """Embeddings differ by their dtype's rounding: noise for a model whose attention cannot be
    computed in another way."""

    def change(module: nn.Module, values: Any, output: Tensor) -> Tensor:
        return _rounded_otherwise(output).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def difference(expected: PassOutput, found: PassOutput) -> float:
    """By how much rows of two passes of one back end differ: the largest root mean square, of
    logits or of hidden states, as a share of the rows' size; NaN if one is NaN."""
    pairs = [(expected.logits, found.logits)]
    if expected.states is not None and found.states is not None:
        pairs += zip(expected.states.unbind(1), found.states.unbind(1), strict=True)
    shares = [
        (_sizes(_shown(ours) - _shown(theirs)) / _sizes(_shown(ours)).clamp(min=_NOTHING))[..., 0]
        for ours, theirs in pairs
    ]
    return float(torch.stack([share.max() for share in shares]).max())


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


def _sizes(rows: Tensor) -> Tensor:
    """[..., 2] root mean square and largest element of [..., width]."""
    return torch.stack((rows.square().mean(-1).sqrt(), rows.abs().amax(-1)), -1)


def _shown(rows: Tensor) -> Tensor:
    """Rows in float32, with 0 in the columns that a model hides by its dtype's least number."""
    return rows.masked_fill(rows <= torch.finfo(rows.dtype).min / 2, 0).float()


def _precise(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **options: Any,
) -> tuple[Tensor, Any]:
    """The model's own eager attention, in float32; arguments and result as `transformers` has them.

    Raises:
        Unsupported: the model has none.
    """
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise Unsupported("eager attention that is no function of its own")
    states = [_rounded_otherwise(each) for each in (query, key, value)]
    mask = None if attention_mask is None else attention_mask.float()
    found, weights = own(module, *states, mask, *args, **options)
    return found.to(query.dtype), weights


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
