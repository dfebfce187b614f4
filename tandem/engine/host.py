"""From the device to the host, once for everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """The tensors as arrays: in place on a CPU, with a single synchronisation elsewhere."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return [copy.numpy() for copy in copies]
