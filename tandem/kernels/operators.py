"""Kernels as operators of torch's library: recorded, captured and traced as torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library: Any = torch.library
_fragment = _library.Library("tandem", "FRAGMENT")


def register(
    schema: str,
    on_cpu: Callable[..., Any],
    on_cuda: Callable[..., Any],
    shapes: Callable[..., Any],
) -> Any:
    """Register an operator, with less work for each call than `torch.library.custom_op` has.

    Args:
        schema: its name, arguments and result, as torch writes them.
        on_cpu: the reference, by torch's own operators.
        on_cuda: launches the kernel.
        shapes: its result for fake tensors, without values.

    Returns:
        The operator, to be called.
    """
    name = schema.partition("(")[0]

    def on_its_device(first: Tensor, *others: Any) -> Any:
        with torch.cuda.device(first.device):  # Triton launches on the current one
            return on_cuda(first, *others)

    _fragment.define(schema)
    _fragment.impl(name, on_cpu, "CPU")
    _fragment.impl(name, on_its_device, "CUDA")
    _library.register_fake(f"tandem::{name}", shapes, lib=_fragment)
    return getattr(torch.ops.tandem, name)


def take(numbers: Tensor) -> bool:
    """Whether kernels compute with such numbers: on a GPU, of all dtypes but float64."""
    return numbers.is_cuda and numbers.dtype != torch.float64
