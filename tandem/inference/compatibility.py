"""Whether a model can be served, by its declared features; `check` compares its rows."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from tandem.errors import StartupError, TandemError, first_line

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
