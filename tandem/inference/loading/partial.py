"""Parts of a decoder: its first layers (the exits of LayerSkip, Elhoushi et al., arXiv 2404.16710),
or all but some sublayers (Draft & Verify, Zhang et al., arXiv 2309.08168).

A part is a decoder of its own from here on: layers and their positions in the KV pool are numbered
from 0, and what is left out is not kept in memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from tandem.errors import StartupError, first_line
from tandem.inference.fingerprint import fingerprints

# Each layer is a residual sum of attention and MLP, each reads through a norm of its own, and no
# layer reads another one's keys: so any sublayer can be left out.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelPart:
    """What is computed of a model.

    Attributes:
        exit: first layers, which the final norm and the head follow; 0 for all.
        skip: path of a file with the sublayers to leave out; empty for none.
    """

    exit: int = 0
    skip: str = ""


WHOLE = ModelPart()


@dataclass(frozen=True)
class Skipped:
    """Sublayers that are left out, by the numbers of their layers from 0.

    Attributes:
        attention: layers whose attention is left out.
        mlp: layers whose MLP is left out.
        made_for: weights fingerprint of the model that they were chosen for; empty for any.
    """

    attention: Sequence[int] = ()
    mlp: Sequence[int] = ()
    made_for: str = ""


def read_skipped(path: str) -> Skipped:
    """The file that `models/zoo/skip_search.py` writes.

    Raises:
        StartupError: there is none, or it is no such file; in one sentence.
    """
    try:
        found = json.loads(Path(path).read_text())
        sets = [_layers(found[key]) for key in ("attention", "mlp")]
        return Skipped(sets[0], sets[1], str(found.get("made_for", "")))
    except OSError as error:
        raise StartupError(f"cannot read the skip file {path!r}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StartupError(
            f"{path!r} is no skip file: it has the numbers of layers in two lists, `attention` and"
            f" `mlp` ({type(error).__name__}: {first_line(error)})"
        ) from error


def _layers(value: object) -> tuple[int, ...]:
    """The numbers of a list, each once.

    Raises:
        TypeError: it is no list of integers.
    """
    if not isinstance(value, list) or any(type(one) is not int for one in value):
        raise TypeError("no list of integers")
    return tuple(sorted(set(value)))


class Sublayers(NamedTuple):
    """Which of a layer's two sublayers are computed."""

    attends: bool
    computes: bool


def sublayers_of(model: PreTrainedModel, part: ModelPart) -> list[Sublayers]:
    """What a part computes of a model's first layers; the others are left out.

    Args:
        model: loaded, whole.
        part: of it.

    Raises:
        StartupError: the model has no such part, or the file is for another model; in one sentence.
    """
    if not _has_parts(model):
        raise StartupError(
            f"no part of {type(model).__name__} can be served: `exit` and `skip` take models of the"
            f" kinds {', '.join(FAMILIES)}"
        )
    layers: Any = model.get_submodule("model.layers")
    count = len(layers)
    if part.exit > count:
        raise StartupError(f"exit = {part.exit}: the model has {count} layers")
    skipped = read_skipped(part.skip) if part.skip else Skipped()
    _check(skipped, part, model, count)
    found = [
        Sublayers(number not in skipped.attention, number not in skipped.mlp)
        for number in range(part.exit or count)
    ]
    if not any(one.attends for one in found):
        raise StartupError("no attention is left of the model: leave out fewer sublayers")
    return found


def require_part(model: PreTrainedModel, part: ModelPart) -> None:
    """Refuse what is no part of a model, or all of it.

    Raises:
        StartupError: see `sublayers_of`; or nothing is left out.
    """
    layers: Any = model.get_submodule("model.layers") if _has_parts(model) else ()
    found = sublayers_of(model, part)
    if len(found) == len(layers) and all(all(one) for one in found):
        raise StartupError(
            "a part of the target that leaves nothing out drafts no faster than the target"
            f" verifies: it has {len(layers)} layers"
        )


def _has_parts(model: PreTrainedModel) -> bool:
    return str(model.config.model_type) in FAMILIES


def take_part(model: PreTrainedModel, part: ModelPart) -> None:
    """Leave out what does not belong to a part. Changes the model.

    Args:
        model: loaded, whole.
        part: what stays.

    Raises:
        StartupError: see `sublayers_of`.
    """
    chosen = sublayers_of(model, part)
    layers: Any = model.get_submodule("model.layers")
    kept: list[nn.Module] = []
    kinds: list[str] = []
    attentions = 0
    all_kinds = getattr(model.config, "layer_types", None)
    for number, own in enumerate(chosen):
        layer = layers[number]
        if own.attends:
            layer.self_attn.layer_idx = attentions
            attentions += 1
        if own.attends and own.computes:
            kept.append(layer)
        elif own.attends or own.computes:
            kept.append(PartialLayer(layer, attends=own.attends))
        else:
            continue
        kinds.append(all_kinds[number] if all_kinds else "")
    model.get_submodule("model").layers = nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    if all_kinds:
        model.config.layer_types = kinds
    # The configuration decides which stored graph of a model fits.
    halves = [("mlp", "attention", "both")[_of(layer)] for layer in kept]
    if set(halves) != {"both"}:
        model.config.sublayers = halves


def _of(layer: Any) -> int:
    if not isinstance(layer, PartialLayer):
        return 2
    return 0 if layer.self_attn is None else 1


def _check(skipped: Skipped, part: ModelPart, model: PreTrainedModel, count: int) -> None:
    """That a file fits the model.

    Raises:
        StartupError: it does not.
    """
    if skipped.made_for and skipped.made_for != fingerprints(model, "").weights:
        raise StartupError(
            f"the skip file {part.skip!r} is for another model, with the weights fingerprint"
            f" {skipped.made_for[:12]}; search again with `python -m models.zoo.skip_search`"
        )
    for name, numbers in (("attention", skipped.attention), ("mlp", skipped.mlp)):
        if numbers and not 0 <= min(numbers) <= max(numbers) < count:
            raise StartupError(
                f"the skip file {part.skip!r}: {name} names layer {max(numbers, key=abs)}; the"
                f" model's layers are 0 to {count - 1}"
            )


class PartialLayer(nn.Module):
    """A decoder layer without its attention, or without its MLP.

    Args:
        layer: of `transformers`.
        attends: whether attention is what is left.
    """

    def __init__(self, layer: Any, *, attends: bool) -> None:
        super().__init__()
        self.self_attn = layer.self_attn if attends else None
        self.input_layernorm = layer.input_layernorm if attends else None
        self.mlp = None if attends else layer.mlp
        self.post_attention_layernorm = None if attends else layer.post_attention_layernorm

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        """[1, T, width] to the same, as the layer that it was part of."""
        if self.self_attn is not None:
            read = self.input_layernorm(hidden_states)  # type: ignore[misc]
            return hidden_states + self.self_attn(hidden_states=read, **arguments)[0]  # type: ignore[no-any-return]
        read = self.post_attention_layernorm(hidden_states)  # type: ignore[misc]
        return hidden_states + self.mlp(read)  # type: ignore[no-any-return,misc]
