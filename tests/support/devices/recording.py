"""Imitates a CUDA graph without a GPU: replays the same operators on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map


class Borrowed:
    """A tensor of memory that was there before a recording, which does not keep it alive: as little
    does a CUDA graph.

    Args:
        tensor: in that memory.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self._dtype = tensor.dtype
        self._form = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        """The tensor.

        Raises:
            AssertionError: its memory has been given back.
        """
        storage = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        assert storage is not None, "a replay uses memory that has been given back"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._form)


@dataclass
class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operator with its arguments and results.

    As in a CUDA graph, decisions of Python code between operators are frozen, and so are numbers
    that are not read from memory. A replayed pass is thus right only if everything that changes is
    in memory that it was captured with, and that somebody keeps.

    Attributes:
        operators: recorded operators.
        replays: number of replays so far.
    """

    operators: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)
    replays: int = 0
    _own: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {_memory(one) for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)}
        found = function(*args, **kwargs)
        made = {_memory(one) for one in tree_flatten(found)[0] if isinstance(one, Tensor)}
        self._own |= made - given
        kept = tree_map(self._kept, (args, kwargs, found))
        self.operators.append((function, *kept))
        return found

    def _kept(self, one: Any) -> Any:
        if not isinstance(one, Tensor) or isinstance(one, FakeTensor):  # which has no memory
            return one
        return one if _memory(one) in self._own else Borrowed(one)

    def replay(self) -> None:
        """Run all operators again."""
        self.replays += 1
        for function, *kept in self.operators:
            args, kwargs, found = tree_map(_back, tuple(kept))
            again = function(*args, **kwargs)
            for old, new in zip(tree_flatten(found)[0], tree_flatten(again)[0], strict=True):
                # A view, or a tensor written in place, is already up to date.
                if isinstance(old, Tensor) and _memory(old) != _memory(new):
                    old.copy_(new)


def _back(one: Any) -> Any:
    return one.tensor() if isinstance(one, Borrowed) else one


def _memory(tensor: Tensor) -> int:
    """Tells storages apart; works for empty tensors too."""
    return int(tensor.untyped_storage()._cdata)


@dataclass
class Recorder:
    """Replaces `cuda_graphs.capture`."""

    recordings: list[Recording] = field(default_factory=list)

    @property
    def replays(self) -> int:
        """Replays of all recordings."""
        return sum(recording.replays for recording in self.recordings)

    def __call__(
        self,
        run: Callable[[], None],
        device: Any,
        memory: Any,
        warm_up: Callable[[], None] | None = None,
    ) -> Callable[[], None]:
        (warm_up or run)()
        recording = Recording()
        with recording:
            run()
        self.recordings.append(recording)
        return recording.replay
