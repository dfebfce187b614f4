"""Counts what would run on a device, of which only fake tensors are there."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what runs on the device: operators that compute, and copies from the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        tensors = found if isinstance(found, tuple | list) else [found]
        there = any(isinstance(one, Tensor) and one.is_cuda for one in tensors)
        if there and not function.is_view and name not in ("_unsafe_view", "empty", "new_empty"):
            given = [one.device.type for one in args if isinstance(one, Tensor)]
            sends = name in ("_to_copy", "copy_") and "cpu" in given
            self.ran["send" if sends else name] += 1
        return found
