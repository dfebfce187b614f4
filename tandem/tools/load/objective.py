"""A service level objective (SLO), and the goodput under it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.failure import Misconfigured
from tandem.tools.load.timeline import Timeline


@dataclass(frozen=True)
class Goodput:
    """The texts that met an objective.

    Attributes:
        share: good texts / requested texts; a failed text is not good.
        texts_per_s: good texts a second.
        held: whether the share is at least the objective's.
    """

    share: float
    texts_per_s: float
    held: bool


@dataclass(frozen=True)
class Objective:
    """The limits of a good text. None is no limit.

    Attributes:
        ttft_ms: from when the text was due to its first token.
        tpot_ms: mean time for each token after the first.
        latency_ms: from when the text was due to its last token.
        share: share of all texts that must be good.
    """

    ttft_ms: float | None = 1000.0
    tpot_ms: float | None = 100.0
    latency_ms: float | None = None
    share: float = 0.99

    @classmethod
    def of(cls, ttft_ms: float, tpot_ms: float, latency_ms: float, share: float) -> Objective:
        """From typed numbers: 0 and infinity are no limit.

        Raises:
            Misconfigured: a number is NaN.
        """
        if any(map(math.isnan, (ttft_ms, tpot_ms, latency_ms, share))):
            raise Misconfigured("a limit of the objective is no number")
        ttft, tpot, latency = (
            milliseconds if 0 < milliseconds < math.inf else None
            for milliseconds in (ttft_ms, tpot_ms, latency_ms)
        )
        return cls(ttft, tpot, latency, share)

    def __str__(self) -> str:
        limits = {"TTFT": self.ttft_ms, "TPOT": self.tpot_ms, "latency": self.latency_ms}
        named = [f"{name} ≤ {ms:g} ms" for name, ms in limits.items() if ms is not None]
        return f"{' and '.join(named) or 'no error'} for {self.share:.4g} of the texts"

    def met(self, text: Timeline) -> bool:
        """Whether a text is good."""
        if text.error or not text.arrivals:
            return False
        spent = (
            (text.time_to_first_token_s, self.ttft_ms),
            (text.time_per_output_token_s, self.tpot_ms),
            (text.latency_s, self.latency_ms),
        )
        return all(limit is None or seconds * 1e3 <= limit for seconds, limit in spent)

    def goodput(self, texts: Sequence[Timeline]) -> Goodput:
        """The goodput of a load of at least one text."""
        good = sum(map(self.met, texts))
        first = min(text.intended_s for text in texts)
        wall = max(text.ended_s for text in texts) - first
        share = good / len(texts)
        return Goodput(share, good / wall if wall else 0.0, share >= self.share)
