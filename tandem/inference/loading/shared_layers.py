"""Models that use a group of layers several times (SPEED, Hooper et al., arXiv 2310.12072).

Their files have the group once, and their configuration says how often it is used; the number of
layers that it says is that of all uses. A reader that does not know this misses weights.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tandem.errors import StartupError
from tandem.inference.loading.partial import FAMILIES

# The key of a configuration: how often the stored layers are used, one cycle after the other.
CYCLES = "layer_cycles"


def as_stored(model: str, config: Any) -> Any:
    """The configuration of what a checkpoint's files have.

    Args:
        model: its name.
        config: of the checkpoint; it is not changed.

    Raises:
        StartupError: it shares its layers in a way that cannot be.
    """
    cycles, layers = getattr(config, CYCLES, 1), getattr(config, "num_hidden_layers", 1)
    if cycles == 1:
        return config
    fault = ""
    if config.model_type not in FAMILIES:
        fault = f"layers are shared in models of the kinds {', '.join(FAMILIES)} alone"
    elif type(cycles) is not int or cycles < 1 or layers % cycles:
        fault = f"{layers} layers are no {cycles!r} cycles of a group"
    kinds = getattr(config, "layer_types", None)
    if not fault and kinds and kinds != kinds[: layers // cycles] * cycles:
        fault = "its layer_types differ from cycle to cycle"
    if fault:
        raise StartupError(f"the model {model!r} ({config.model_type}), {CYCLES}: {fault}")
    stored = copy.deepcopy(config)
    stored.num_hidden_layers = layers // cycles
    if kinds:
        stored.layer_types = kinds[: layers // cycles]
    return stored


def share_layers(model: PreTrainedModel) -> None:
    """Give a model that was read as it is stored all of its layers. Changes the model; the weights
    stay once in memory."""
    cycles = int(getattr(model.config, CYCLES, 1))
    if cycles == 1:
        return
    stored: Any = model.get_submodule("model.layers")
    layers: list[nn.Module] = []
    # What changes the configuration later means all layers.
    shared = {id(one): one for one in (model.config, *stored.parameters())}
    for number in range(cycles * len(stored)):
        layer = stored[number % len(stored)]
        own: Any = copy.deepcopy(layer, dict(shared))
        own.self_attn.layer_idx = number
        layers.append(own)
    model.get_submodule("model").layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types * cycles
