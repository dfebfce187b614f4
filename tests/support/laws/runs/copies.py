"""Copies of a target's sequence, in each of whose outcomes a text goes on."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from tandem.inference.kv.extents import SequenceCache
from tandem.inference.kv.viewed import ViewedCache
from target_svc.round import TargetSequence


class SequenceCopies(pickle.Pickler):
    """Copies of a sequence. It is pickled once, but for its grammar: `deepcopy` takes longer."""

    def __init__(self, sequence: TargetSequence) -> None:
        self._aside: list[Any] = []
        self._pickled = io.BytesIO()
        super().__init__(self._pickled, pickle.HIGHEST_PROTOCOL)
        self.dump(sequence)

    def reducer_override(self, part: Any) -> Any:
        if not isinstance(part, ViewedCache):
            return NotImplemented
        return _view_of, (part.of, [getattr(part, name) for name in _OWN])

    def persistent_id(self, part: Any) -> int | None:
        if not isinstance(part, (LLMatcher, LLTokenizer)):
            return None
        self._aside.append(part)
        return len(self._aside) - 1

    def fresh(self) -> TargetSequence:
        """One more."""
        found: TargetSequence = _Unpickler(self._pickled.getvalue(), self._aside).load()
        return found


# What a view has of its own.
_OWN = ("length", "branches", "branch_tokens", "exit_states", "nodes")


def _view_of(of: SequenceCache, own: Sequence[Any]) -> ViewedCache:
    found = ViewedCache()
    found.show(of)
    for name, value in zip(_OWN, own, strict=True):
        setattr(found, name, value)
    return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, aside: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._aside = aside

    def persistent_load(self, number: int) -> Any:
        return copy.deepcopy(self._aside[number])
