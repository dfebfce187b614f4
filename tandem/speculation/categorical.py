"""The sparse categorical with integer weights: small on the wire, and exact.

The drafter first truncates and rounds its distributions, then samples from the result, so the
target can rebuild the exact distribution that a token was drawn from. Truncation may cost
acceptance, never correctness.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import int32, int64, void
from torch import Tensor

from tandem.speculation.kernel import kernel, readonly

MAX_WEIGHT = 65535


@dataclass(frozen=True, slots=True)
class Categorical:
    """Distributions over token ids: weight / sum of weights, 0 elsewhere.

    Attributes:
        ids: [B, K] int64, distinct in each row.
        weights: [B, K] int64, the largest of each row 65535; entries of weight 0 are padding.
    """

    ids: Tensor
    weights: Tensor

    @classmethod
    def quantize(cls, probs: Tensor, mass: float, support: int) -> Categorical:
        """Truncate distributions and round them to integer weights.

        Keeps the smallest set of most likely tokens that covers `mass`, at most `support` of
        them, scales the largest probability to 65535 and drops what rounds to 0.

        Args:
            probs: [B, V] probabilities.
            mass: the share to cover, in [0.001, 1]; ignored if `support` is 0.
            support: the most tokens to keep; 0 keeps the full vocabulary.
        """
        if support == 0:
            ids = torch.arange(probs.shape[1], device=probs.device).expand_as(probs)
            return cls(ids, _scaled(probs, probs.amax(-1, keepdim=True)))
        values, ids = likeliest(probs, min(support, probs.shape[1]))
        # The mass before the likeliest token is 0, so that token is always kept.
        covered = values.cumsum(-1).sub_(values) >= mass
        return cls(ids, _scaled(values, values[:, :1]).masked_fill_(covered, 0))

    @classmethod
    def argmax(cls, logits: Tensor) -> Categorical:
        """Rows for temperature 0: the token of the largest of logits [B, V], the first if equal."""
        best, ids = largest(logits)
        # A row that is not finite gets no weight, which is detected later.
        return cls(ids, (best.abs() < torch.inf).long().mul_(MAX_WEIGHT))

    def draw(self, digits: Tensor) -> Tensor:
        """Draw a token from each row by integer arithmetic.

        Args:
            digits: [B, 2] int64, the low and high 32-bit digits of uniform 64-bit integers. (A
                full row's weights can add up to more than 2**32, so 32 bits would not reach
                every token.)

        Returns:
            [B] int64 token ids.
        """
        sums = self.weights.cumsum(-1)
        total = sums[:, -1]
        parts, size = digits.unbind(1), 32
        if sums.shape[1] * MAX_WEIGHT >= 2**31:  # products must fit 63 bits
            parts, size = tuple(d for w in parts for d in (w & 0xFFFF, w >> 16)), 16
        # floor(bits * total / 2**64), digit by digit.
        point = (parts[0] * total).bitwise_right_shift_(size)
        for part in parts[1:]:
            point.addcmul_(part, total).bitwise_right_shift_(size)
        # A row without any weight has no such place; this is detected when the draft is complete.
        place = torch.searchsorted(sums, point[:, None], right=True).clamp_(max=sums.shape[1] - 1)
        return self.ids.gather(1, place).squeeze(1)


def largest(values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of each row [B, V] and its id, [B, 1] each; the first of equal ones, and a
    NaN where there is one.

    On a CPU torch looks for it twenty times as long as numpy: 3 ms in sixteen rows of 128,256.
    """
    if values.is_cuda or values.dtype == torch.bfloat16:
        found = values.max(-1, keepdim=True)
        return found.values, found.indices
    ids = torch.from_numpy(values.numpy().argmax(-1, keepdims=True))
    return values.gather(-1, ids), ids


def likeliest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest entries of each row [B, V], descending, and their ids, [B, count] each; equal
    ones are in the order of their ids.
    """
    if values.is_cuda or values.dtype != torch.float32:
        found, ids = values.sort(descending=True, stable=True)
        return found[:, :count], ids[:, :count]
    keys = likeliest_keys(values.contiguous().numpy(), count)
    ids = torch.from_numpy(keys.view(np.int32)[:, ::2].astype(np.int64))
    return values.gather(1, ids), ids


# Lanes for each entry that is wanted of a row. With fewer entries a lane all are sorted.
_LANES, _LEAST = 4, 16


def likeliest_keys(values: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """[B, count] keys of the largest entries of each row [B, V], descending; the lower half of a
    key is the token id.

    torch's topk takes 100 microseconds for 512 of 4,096, these two vectorised sorts 11. Numbers
    sort like their bits, if negative ones are turned around; the id in the lower half makes keys
    unique. Of a long row only entries that reach a bound are sorted.
    """
    if count * _LANES * _LEAST <= values.shape[1]:
        found = np.stack([_of_long(row, count) for row in values])
    else:
        keys = _keys(values, _ids(values.shape[1]))
        if count < keys.shape[1]:
            keys.partition(count - 1, axis=-1)
        found = keys[:, :count].copy()
    found.sort(axis=-1)
    return found


@lru_cache(maxsize=8)
def _ids(count: int) -> npt.NDArray[np.int64]:
    return np.arange(count)


def _of_long(row: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """[count] keys of the largest entries of a row [V], in no order.

    The row is dealt to lanes. The `count`-th largest of the lanes' maxima is a bound that at least
    `count` entries reach, and few more.
    """
    lanes = count * _LANES
    dealt = row[: len(row) // lanes * lanes].reshape(-1, lanes)
    bound = np.partition(dealt.max(0), -count)[-count]
    ids = np.flatnonzero(row > bound)
    if len(ids) < count:
        # The first of equal ones are mostly found at once: zeros, after what top-p keeps.
        equal = np.flatnonzero(row[:lanes] == bound)[:count]
        if len(ids) + len(equal) < count:
            equal = np.flatnonzero(row == bound)[:count]
        ids = np.sort(np.concatenate((ids, equal)))
    if len(ids) < count:  # a number that is none, which nothing reaches
        ids = _ids(len(row))
    keys = _keys(row[None, ids], ids)
    if count < len(ids):
        keys.partition(count - 1, axis=-1)
    found: npt.NDArray[np.int64] = keys[0, :count]
    return found


def _keys(values: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[B, N] keys of numbers [B, N] and their ids [N]."""
    keys: npt.NDArray[np.int64] = np.empty(values.shape, np.int64)
    _write_keys(values.view(np.int32), ids, keys)
    return keys


@kernel(void(readonly(int32, 2), readonly(int64), int64[:, ::1]))
def _write_keys(bits: Any, ids: Any, keys: Any) -> None:
    for row in range(bits.shape[0]):
        for i in range(bits.shape[1]):
            number = bits[row, i]
            ordered = number ^ int32(int32(number >> 31) & int32(0x7FFFFFFF))
            ordered += ordered == -1  # -0 is 0
            keys[row, i] = (-int64(ordered) << 32) | ids[i]


def _scaled(probs: Tensor, largest: Tensor) -> Tensor:
    """Weights [B, K] int64, scaled so that the largest probability [B, 1] becomes 65535."""
    # A NaN becomes 0 by the clamp, and not an arbitrary integer.
    return (probs / largest).mul_(MAX_WEIGHT).round_().long().clamp_(min=0)
