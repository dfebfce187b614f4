"""Imitates a CUDA graph without a GPU: replays the same operators on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


@dataclass
class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operator with its arguments and results.

    As in a CUDA graph, decisions of Python code between operators are frozen, and so are numbers
    that are not read from memory. A replayed pass is thus right only if everything that changes is
    in memory that it was captured with.

    Attributes:
        operators: recorded operators.
        replays: number of replays so far.
    """

    operators: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)
    replays: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        self.operators.append((function, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        """Run all operators again."""
        self.replays += 1
        for function, args, kwargs, found in self.operators:
            again = function(*args, **kwargs)
            for old, new in zip(tree_flatten(found)[0], tree_flatten(again)[0], strict=True):
                # A view, or a tensor written in place, is already up to date.
                if isinstance(old, Tensor) and not _shares_memory(old, new):
                    old.copy_(new)


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share their storage; works for empty tensors too."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


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
