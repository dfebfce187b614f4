"""How many tokens a round would yield under another rule or draft length.

Let r be the target's probability of a drafted token divided by the drafter's; under the drafter's
own draws its mean is 1. `token` keeps the first i tokens with probability Π min(1, r_j), `block`
with p_i = min(1, p_(i-1) r_i) (arXiv 2403.10444, lemma 3). Neither depends on how many tokens
follow, so a place's share of kept drafts carries over to other lengths.

To predict one rule from the other, only the distribution of r is missing. It is modelled as
log-normal and independent from place to place. Its width is itself drawn (exponentially) for each
place of each draft, because some contexts are easy and some are not. The mean width is fitted to
the recorded share. On shares such as the embedded pair's, the model predicts that `block` yields
1.044 and 1.126 times `token` for gamma 4 and 8; measured were 1.047 ± 0.005 and 1.126 ± 0.011
(docs/benchmark.md). With a single width it would predict 1.086 and 1.240.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

import numpy as np
from numpy.typing import NDArray

_DRAWS = 20_000
_SEED = 0
# Largest mean width: beyond it hardly a token is kept.
_WIDEST = 1_000.0
_HALVINGS = 40
_LARGEST_LOG = 50.0

_Array = NDArray[np.float64]


def continued(onward: Sequence[float], reached: Sequence[int], gamma: int) -> list[float]:
    """For each of `gamma` places: of the drafts kept up to it, the share that keep its token too.

    Places beyond the recorded ones get the pooled share of the recorded places from the second on.
    The first place is left out because no kept tokens come before it.

    Args:
        onward: recorded shares.
        reached: recorded drafts kept up to each place.
        gamma: places wanted.
    """
    known = [share for share, count in zip(onward, reached, strict=True) if count]
    known = known[:gamma]
    later = [(o, r) for o, r in zip(onward[1:], reached[1:], strict=True) if r]
    if later:
        rest = sum(o * r for o, r in later) / sum(r for _, r in later)
    else:
        rest = known[-1] if known else 0.0
    return known + [rest] * (gamma - len(known))


def kept(onward: Sequence[float]) -> list[float]:
    """For each place, the share of drafts that keep its token."""
    return list(accumulate(onward, mul))


# How often the token that ends a round is among those that a drafter expects there, over how often
# its own token is kept there: after a whole draft, and in place of a rejected token. Of the
# embedded pair with sixteen prepared drafts of four tokens (benchmarks/ahead.py), by whether the
# temperature is 0.
_GUESSED = {True: (1.1, 1.0), False: (0.9, 0.45)}


def foreseen(shares: Sequence[float], gamma: int, greedy: bool) -> float:
    """Share of rounds after whose outcome a draft would have been prepared.

    Args:
        shares: of drafts kept up to each place; one more than gamma.
        gamma: tokens of a draft.
        greedy: temperature 0.
    """
    behind, instead = _GUESSED[greedy]
    reached = [1.0, *shares[: gamma + 1]]
    onward = [b / a if a else 0.0 for a, b in pairwise(reached)]
    rejected = sum(
        (a - b) * min(instead * share, 1.0)
        for (a, b), share in zip(pairwise(reached[: gamma + 1]), onward, strict=False)
    )
    return rejected + reached[gamma] * min(behind * onward[gamma], 1.0)


class RatioModel:
    """Ratios along drafts, fitted place by place to a rule's recorded shares.

    Args:
        shares: for each place, the recorded share of drafts that kept its token.
        rule: the rule of that recording, `token` or `block`.
    """

    def __init__(self, shares: Sequence[float], rule: str) -> None:
        numbers = np.random.default_rng(_SEED)
        kept_by = {"token": np.ones(_DRAWS), "block": np.ones(_DRAWS)}
        self._shares: dict[str, list[float]] = {"token": [], "block": []}
        for share in shares:
            law = _Law(numbers.standard_normal(_DRAWS), numbers.standard_exponential(_DRAWS))
            ratios = law.fitted(rule, kept_by[rule], share)
            for name, before in kept_by.items():
                kept_by[name] = _KEEP[name](before, ratios)
                self._shares[name].append(float(kept_by[name].mean()))

    def shares(self, rule: str) -> list[float]:
        """For each place, the share of drafts that keep its token under `token` or `block`."""
        return self._shares[rule]


# The probability of keeping a place, from that of the place before and this place's ratios.
_KEEP: dict[str, Callable[[_Array, _Array], _Array]] = {
    "token": lambda before, ratios: before * np.minimum(ratios, 1.0),
    "block": lambda before, ratios: np.minimum(before * ratios, 1.0),
}
RULES = frozenset(_KEEP)


@dataclass(frozen=True)
class _Law:
    """Random draws for one place's ratios, to be scaled by a mean width."""

    normal: _Array
    width: _Array

    def ratios(self, mean_width: float) -> _Array:
        width = mean_width * self.width
        found: _Array = np.exp(np.minimum(width * self.normal - width * width / 2, _LARGEST_LOG))
        return found

    def fitted(self, rule: str, before: _Array, share: float) -> _Array:
        """The ratios of the narrowest distribution with which at most `share` is kept."""
        low, high = 0.0, _WIDEST
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            now = float(_KEEP[rule](before, self.ratios(middle)).mean())
            low, high = (middle, high) if now > share else (low, middle)
        return self.ratios(high)
