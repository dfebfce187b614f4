"""Draws and verdicts by the operators that are kernels on a GPU, on a CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tandem.kernels import draws, operators, verdicts


@contextmanager
def by_operators() -> Iterator[Counter[str]]:
    """The engine asks operators wherever a GPU's kernels would be asked; how often it did."""
    asked: Counter[str] = Counter()

    def counted(name: str, operator: Callable[..., Any]) -> Callable[..., Any]:
        def compute(*args: Any) -> Any:
            asked[name] += 1
            return operator(*args)

        return compute

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "take", lambda _: True)
        for module, name in ((draws, "draw"), (verdicts, "decide")):
            patch.setattr(module, name, counted(name, getattr(module, name)))
        yield asked
