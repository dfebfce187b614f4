"""Records the key of every random number that a run uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tandem.engine.numbers import decisions, draws
from tandem.speculation import randomness, sampler
from tandem.speculation.categorical import Categorical
from tandem.verification import Verifier
from tandem.verification.kernels import chains as fused

# (purpose, part, round, row)
Key = tuple[int, int, int, int]


class Keys:
    """How often each number was used, by its key.

    A number's key is found by its value: two numbers of 64 or 53 bits are hardly ever equal.
    """

    def __init__(self) -> None:
        self.used: Counter[Key] = Counter()
        self._digits: dict[tuple[int, int], Key] = {}
        self._uniforms: dict[float, Key] = {}

    def made(self, counters: npt.NDArray[np.uint64], words: npt.NDArray[np.uint64]) -> None:
        for i, (row, low, high, purpose) in enumerate(counters.T.tolist()):
            key = purpose & 0xFF, purpose >> 8, low | high << 32, row
            self._digits[int(words[0, i]), int(words[1, i])] = key
            self._uniforms[float(randomness.uniforms(words[:, i]))] = key

    def drew(self, digits: npt.NDArray[np.int64]) -> None:
        """Digits [B, 2], zeros where a row has no draw."""
        for low, high in digits.tolist():
            if low or high:
                self.used[self._digits[low, high]] += 1

    def decided(self, uniforms: npt.NDArray[np.float64]) -> None:
        """Uniforms [B, N+1], ones where a draft has no token."""
        for value in uniforms.flatten().tolist():
            if value < 1:
                self.used[self._uniforms[value]] += 1

    @property
    def repeated(self) -> list[Key]:
        return [key for key, count in self.used.items() if count > 1]

    def rows(self, purpose: randomness.Purpose, *, of_parts: bool = False) -> int:
        """Numbers of a purpose: of the target and of a single method, or of a recipe's parts."""
        return sum(key[0] == purpose and (key[1] > 0) == of_parts for key in self.used)


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keys]:
    """Record the numbers where they are used, whatever they were meant for."""
    keys = Keys()

    def philox(counters: npt.NDArray[np.uint64], seeds: npt.NDArray[np.uint64]) -> Any:
        words = made(counters, seeds)
        keys.made(counters, words)
        return words

    def sample(probs: Any, mass: float, support: int, digits: npt.NDArray[np.int64]) -> Any:
        keys.drew(digits)
        return sampler.sample(probs, mass, support, digits)

    def draw(self: Categorical, digits: Any) -> Any:
        keys.drew(digits.numpy())
        return drawn(self, digits)

    def decide_all(*args: Any) -> Any:
        keys.decided(args[4])
        return fused.decide_all(*args)

    def decide_trees(*args: Any) -> Any:
        keys.decided(args[4])
        return fused.decide_trees(*args)

    def verify(self: Verifier[Any], proposal: Any, p: Any, uniforms: Any, carry: Any = None) -> Any:
        keys.decided(uniforms.numpy())
        return verified(self, proposal, p, uniforms, carry)

    made, drawn, verified = randomness.philox4x32, Categorical.draw, Verifier.verify
    with monkeypatch.context() as patch:
        patch.setattr(randomness, "philox4x32", philox)
        patch.setattr(draws, "sample", sample)
        patch.setattr(Categorical, "draw", draw)
        patch.setattr(decisions, "decide_all", decide_all)
        patch.setattr(decisions, "decide_trees", decide_trees)
        patch.setattr(Verifier, "verify", verify)
        yield keys
