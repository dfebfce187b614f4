"""Hidden states that a model's passes give beside logits: of which layers, and where from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from tandem.errors import StartupError
from tandem.speculation.feedback import MOST_LAYERS

# 0 is what the first layer reads (the embedding), i the output of layer i, and the number of layers
# plus one what the head reads, after the final norm.
Layers = tuple[int, ...]
NONE, LAST = "none", "last"


def layers_from(text: str, model: PreTrainedModel) -> Layers:
    """The layers that a setting names.

    Args:
        text: "none", or numbers and "last", joined by commas.
        model: whose layers they are.

    Raises:
        StartupError: the model has no such layer, one is named twice, or too many are.
    """
    if text == NONE:
        return ()
    count = _count(model)
    names = text.split(",")
    layers = tuple(count + 1 if name == LAST else int(name) for name in names)
    if max(layers) > count + 1 or (count + 1 in layers and LAST not in names):
        raise StartupError(
            f"the model has no layer {max(layers)}: its layers are 0 (the embedding), 1 to {count},"
            f" and {LAST!r} (after the final norm)"
        )
    if len(set(layers)) < len(layers) or len(layers) > MOST_LAYERS:
        raise StartupError(f"name at most {MOST_LAYERS} layers, each once, got {text!r}")
    return layers


class Tap:
    """Takes hidden states out of a model while its own modules compute.

    Args:
        model: gets a hook a layer, which keeps a reference and computes nothing.
        layers: see `Layers`; at least one.

    Raises:
        StartupError: the model's layers are not found.
    """

    def __init__(self, model: PreTrainedModel, layers: Layers) -> None:
        self._layers = layers
        self._found: dict[int, Tensor] = {}
        inner, blocks = _parts(model)
        self._hooks = [self._hook(inner, blocks, layer) for layer in layers]

    def _hook(self, inner: nn.Module, blocks: nn.ModuleList, layer: int) -> RemovableHandle:
        def read(module: nn.Module, values: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._found[layer] = values[0] if values else named["hidden_states"]

        def written(module: nn.Module, values: Any, output: Any) -> None:
            self._found[layer] = output if isinstance(output, Tensor) else output[0]

        if not layer:
            return blocks[0].register_forward_pre_hook(read, with_kwargs=True)
        return (blocks[layer - 1] if layer <= len(blocks) else inner).register_forward_hook(written)

    def take(self, rows: Tensor | None) -> Tensor | None:
        """[S, layers, width] states of rows [S] of the pass that was just computed; None for None.
        The pass is forgotten."""
        found = self._found.copy()
        self._found.clear()
        if rows is None:
            return None
        return stack_states([found[layer][0] for layer in self._layers], rows)

    def whole(self) -> list[Tensor]:
        """[B, T, width] of each layer, of all rows of the pass that was just computed; the pass is
        forgotten."""
        found = self._found.copy()
        self._found.clear()
        return [found[layer] for layer in self._layers]

    def close(self) -> None:
        """Take the hooks out."""
        for hook in self._hooks:
            hook.remove()


def stack_states(states: Sequence[Tensor], rows: Tensor) -> Tensor:
    """[S, layers, width] from a tensor [T, width] a layer, for rows [S] of T."""
    return torch.stack([layer.index_select(0, rows) for layer in states], 1)


@contextmanager
def tapped(model: PreTrainedModel, layers: Layers) -> Iterator[Tap | None]:
    """A tap for a while; None where no layers are wanted."""
    tap = Tap(model, layers) if layers else None
    try:
        yield tap
    finally:
        if tap is not None:
            tap.close()


def blocks_of(model: PreTrainedModel) -> Sequence[nn.Module]:
    """A model's layers; none if they are not found."""
    try:
        return tuple(_parts(model)[1])
    except StartupError:
        return ()


def _count(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def _parts(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The module that holds the layers and ends with the final norm, and the layers."""
    for module in model.modules():
        for blocks in module.children():
            if isinstance(blocks, nn.ModuleList) and len(blocks) == _count(model):
                return module, blocks
    raise StartupError(f"no hidden states of {type(model).__name__}: its layers are not found")
