"""Lower bounds of a service's times: the bare models in one process, and the memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch

from tandem.inference.decoder import Decoder, DecoderOptions
from tandem.inference.feed import Feed
from tandem.inference.kv.pool import SequenceCache
from tandem.inference.loading.checkpoint import CheckpointSource, read_checkpoint

# Positions already in the cache: about the middle of a text of the benchmark.
_CONTEXT = 64
_CACHE_TOKENS = 1024
# Larger than all CPU caches, so that a copy measures the memory.
_COPIED_BYTES = 2**29
_COPIES = 3


@dataclass(frozen=True)
class BareRound:
    """Times of the same rounds, without services, verifier or sampling.

    Attributes:
        draft_s: of each round, its gamma draft steps.
        target_s: of each round, its target pass of gamma + 1 rows.
    """

    draft_s: list[float] = field(default_factory=list)
    target_s: list[float] = field(default_factory=list)

    @property
    def round_s(self) -> float:
        """Median of their sum."""
        return median(d + t for d, t in zip(self.draft_s, self.target_s, strict=True))


class Floor:
    """A pair in this process, whose bare rounds are timed: the in-process floor of a round.

    Attributes:
        dtype: the target's; the drafter uses the fastest.
        bandwidth: bytes read and written a second, in the fastest copy of `measure`.
        rounds: by gamma; each call of `measure` adds to them.
        target_bytes: size of the target's weights.
        target_parameters: their number.

    Args:
        drafter: folder of its checkpoint.
        target: folder of its checkpoint.
        dtype: the target's.
        gammas: draft lengths, 0 for plain decoding.
    """

    def __init__(self, drafter: str, target: str, dtype: str, gammas: Sequence[int]) -> None:
        self.dtype = dtype
        self.bandwidth = 0.0
        self.rounds = {gamma: BareRound() for gamma in gammas}
        self._drafter = _fastest(drafter, "auto", drafts=True)
        self._target = _fastest(target, dtype)
        size = getattr(torch, dtype).itemsize
        self.target_parameters = self._target.about.parameters
        self.target_bytes = self.target_parameters * size
        self._drafter_cache = self._prefilled(self._drafter)
        self._target_cache = self._prefilled(self._target)

    def _prefilled(self, decoder: Decoder) -> SequenceCache:
        cache = decoder.reserve(_CACHE_TOKENS // 2)
        assert cache is not None, "an empty pool has room"
        with torch.inference_mode():
            decoder.forward([Feed(cache, [1] * _CONTEXT, 1)])
        return cache

    @torch.inference_mode()
    def measure(self, repeats: int) -> None:
        """Time rounds of every gamma in turn, and a copy of memory."""
        self.bandwidth = max(self.bandwidth, copy_bandwidth())
        for _ in range(repeats):
            for gamma, times in self.rounds.items():
                started = time.perf_counter()
                for token in range(gamma):
                    self._drafter.forward([Feed(self._drafter_cache, [token], 1)])
                drafted = time.perf_counter()
                self._target.forward([Feed(self._target_cache, [1] * (gamma + 1), gamma + 1)])
                ended = time.perf_counter()
                times.draft_s.append(drafted - started)
                times.target_s.append(ended - drafted)
                self._drafter_cache.rollback(_CONTEXT)
                self._target_cache.rollback(_CONTEXT)

    def as_json(self) -> dict[str, Any]:
        """For json.dumps: what was measured, and the target's size."""
        names = ("dtype", "bandwidth", "target_parameters", "target_bytes")
        rounds = {str(gamma): asdict(times) for gamma, times in self.rounds.items()}
        return {name: getattr(self, name) for name in names} | {"rounds": rounds}


def copy_bandwidth() -> float:
    """Bytes read and written a second, in the fastest of a few large copies on all cores."""
    source = torch.ones(_COPIED_BYTES // 4)
    copy = torch.empty_like(source)
    best = float("inf")
    for _ in range(_COPIES):
        started = time.perf_counter()
        copy.copy_(source)
        best = min(best, time.perf_counter() - started)
    return 2 * _COPIED_BYTES / best


def _fastest(model: str, dtype: str, drafts: bool = False) -> Decoder:
    """A decoder with the back end that a service ends up with."""
    options = DecoderOptions(
        cache_tokens=_CACHE_TOKENS, engine="auto", drafts=drafts and dtype == "auto"
    )
    decoder = Decoder(read_checkpoint(CheckpointSource(model, "cpu", dtype)), options)
    decoder.improve()
    return decoder
