"""Whether a model can be served: a check of its declared features, then of its logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.errors import StartupError, TandemError, first_line
from tandem.inference.hidden_states import Layers, tapped
from tandem.inference.output import PassOutput

# Largest accepted difference of logits, as a share of their spread. Another order of summation
# causes less; attention to wrong positions causes many times as much.
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
_LAYER_KINDS = ("full_attention", "sliding_attention")


def check_support(model: PreTrainedModel) -> None:
    """Refuse a model that cannot be rewound, or whose attention cannot be replaced.

    Raises:
        StartupError: the model is refused; names the architecture and the reason.
    """
    check_rewind(model)
    if not getattr(model, "_supports_attention_backend", False):
        raise cannot_serve(model, "its attention cannot be replaced by a batched one")


def check_rewind(model: PreTrainedModel) -> None:
    """Refuse a model that cannot be rewound after a rejection.

    Raises:
        StartupError: the model is refused; names the architecture and the reason.
    """
    if getattr(model, "_is_stateful", False):
        raise cannot_serve(model, "its recurrent state cannot be rewound after a rejection")
    for kind in getattr(model.config.get_text_config(), "layer_types", None) or ():
        if kind not in _LAYER_KINDS:
            raise cannot_serve(model, f"it has layers of the kind {kind!r}")


def max_positions(config: Any) -> int:
    """The most positions that a model supports with the same results in any batch.

    Args:
        config: of a text model.
    """
    limit = int(getattr(config, "max_position_embeddings", None) or 2**31 - 1)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # some models have one set for each kind of layer
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            # A longer text changes the frequencies for the whole batch.
            limit = min(limit, int(parameters["original_max_position_embeddings"]))
    return limit


def plain_pass(
    model: PreTrainedModel, token_ids: Sequence[int], of_layers: Layers = ()
) -> PassOutput:
    """All rows of one sequence by the model's own attention, without a cache.

    Eager attention honours everything that a model asks for, such as soft caps.

    Raises:
        StartupError: the logits are not finite.
    """
    model.set_attn_implementation("eager")
    tokens = torch.tensor([list(token_ids)], device=model.device)
    with tapped(model, of_layers) as tap:
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits[0]
        rows = torch.arange(len(logits), device=model.device)
        states = None if tap is None else tap.take(rows)
    if not bool(logits.isfinite().all()):
        raise StartupError(f"the model {name_of_model(model)} computes logits that are not finite")
    return PassOutput(logits, states)


def compare(model: PreTrainedModel, expected: PassOutput, found: PassOutput) -> None:
    """Refuse a model whose rows in a ragged batch differ from a plain pass.

    Raises:
        StartupError: the model is refused; names the architecture and the difference.
    """
    if found.logits.shape != expected.logits.shape:
        raise cannot_serve(model, "it does not compute the logits of chosen rows alone")
    if not agrees(expected, found):
        worst = _difference(expected, found)
        raise cannot_serve(model, f"a ragged batch differs from a plain pass ({worst:.2g} std)")


def agrees(expected: PassOutput, found: PassOutput) -> bool:
    """Whether the rows differ by no more than the order of summation explains."""
    return _difference(expected, found) <= _TOLERANCES.get(expected.logits.dtype, 1e-3)


def _difference(expected: PassOutput, found: PassOutput) -> float:
    """The largest difference of logits, or of a layer's hidden states, as a share of their spread;
    NaN if one is NaN."""
    pairs = [(expected.logits, found.logits)]
    if expected.states is not None and found.states is not None:
        pairs += zip(expected.states.unbind(1), found.states.unbind(1), strict=True)
    shares = [
        (ours.float() - theirs.float()).abs().max() / (ours.float().std() + 1e-6)
        for ours, theirs in pairs
    ]
    return float(torch.stack(shares).max())


def cannot_serve(model: PreTrainedModel, reason: str | Exception) -> StartupError:
    """The error that refuses a model, with its name and the reason."""
    if isinstance(reason, Exception) and not isinstance(reason, TandemError):
        kind = type(reason).__name__
        reason = f"its cache or attention is of another kind ({kind}: {first_line(reason)})"
    return StartupError(
        f"cannot serve {name_of_model(model)}: {reason};"
        " docs/architectures.md lists what can be served"
    )


def name_of_model(model: PreTrainedModel) -> str:
    """A model's class and type, for messages."""
    return f"{type(model).__name__} ({model.config.model_type})"
