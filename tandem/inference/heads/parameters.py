"""The weights of a head that are trained, under the names that they have in its files."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class HeadParameters(nn.Module):
    """Parameters whose names have dots: each part of a name is a module.

    Args:
        tensors: by their names in the files, such as "blocks.0.layers.1.weight"; copied, float32.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            inner: nn.Module = self
            for part in path:
                if part not in inner._modules:
                    inner.add_module(part, nn.Module())
                inner = inner.get_submodule(part)
            inner.register_parameter(
                last, nn.Parameter(tensor.detach().to(torch.float32, copy=True))
            )

    @property
    def by_name(self) -> dict[str, Tensor]:
        """The parameters, by their names in the files."""
        return dict(self.named_parameters())
