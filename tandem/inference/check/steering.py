"""Layers that all read the plain pass's states, so that each can be compared by itself.

Rounding errors grow from layer to layer: after thirty layers in bfloat16 they hide a position that
is off by one. A layer that reads exactly what the plain pass's layer read differs by its own
rounding alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ROUTERS = ("gate", "router")


class Steering:
    """Records what layers give, and replaces what they and their routers read.

    Rounding may send a token to another expert, which is no mistake of a batch but looks like one.

    Args:
        blocks: the layers, in order.
        given: [P, width] what each layer, and then each router, reads at each place of the plain
            pass; empty to replace nothing.

    Attributes:
        read: [T, width] a layer, and then a router, in the last pass, before it was replaced.
        stages: [T, width] what the first layer read before it was replaced, which is the embedding,
            and what each layer wrote, in the last pass.
    """

    def __init__(self, blocks: Sequence[nn.Module], given: Sequence[Tensor] = ()) -> None:
        self._blocks, self._given = blocks, given
        self._readers = (*blocks, *routers_in(blocks))
        self._places: Tensor | None = None
        self._read: dict[int, Tensor] = {}
        self._written: list[Tensor] = []

    @property
    def read(self) -> list[Tensor]:
        """See the class."""
        return [self._read[number] for number in sorted(self._read)]

    @property
    def stages(self) -> list[Tensor]:
        """See the class."""
        return [*self.read[:1], *self._written]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The layers are watched inside the context."""
        hooks = [block.register_forward_hook(self._behind) for block in self._blocks]
        for number, reader in enumerate(self._readers):
            hooks.append(reader.register_forward_pre_hook(self._before(number), with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self, places: Tensor | None = None) -> None:
        """Before a pass.

        Args:
            places: [T] of the rows in `given`; -1 for a row that goes on with its own states.
        """
        self._places = places
        self._read, self._written = {}, []

    def _before(self, number: int) -> Any:
        def read(module: nn.Module, values: tuple[Any, ...], named: dict[str, Any]) -> Any:
            states: Tensor = values[0] if values else named["hidden_states"]
            self._read[number] = _rows(states)
            if self._places is None or not self._given:
                return None
            own = self._places[:, None] < 0
            given = self._given[number].index_select(0, self._places.clamp(min=0))
            states = torch.where(own, states.flatten(0, -2), given).view_as(states)
            return (
                ((states, *values[1:]), named)
                if values
                else ((), named | {"hidden_states": states})
            )

        return read

    def _behind(self, module: nn.Module, values: Any, output: Any) -> None:
        self._written.append(_rows(output if isinstance(output, Tensor) else output[0]))


def routers_in(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that choose experts, by the names that they have in `transformers`."""
    return [
        module
        for block in blocks
        for name, module in block.named_modules()
        if name.rpartition(".")[2] in _ROUTERS
    ]


def _rows(states: Tensor) -> Tensor:
    """[T, width] of [..., T, width], of its own memory."""
    return states.detach().flatten(0, -2).clone()
