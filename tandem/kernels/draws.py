"""Draws from a pass's rows: their laws, their likeliest tokens, and tokens drawn from these.

Tokens are ordered by their logits, the largest first, and equal ones by their ids. Top-k, top-p and
min-p keep the first tokens of that order. A *law* here is a few numbers that say where the kept
tokens end and from which a token's probability is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.kernels.operators import register
from tandem.speculation.categorical import Categorical
from tandem.speculation.distribution import process
from tandem.speculation.request.sampling import Sampling

# The widest rows that are put in order by one program.
WIDEST = 1024
# Columns of what is asked of a row, float64: its index in the logits, the number of ids that may be
# drawn, its sampling, whether siblings are distinct; then two digits for each sibling.
ROW, SIZE, TEMPERATURE, TOP_K, TOP_P, MIN_P, DISTINCT, DIGITS = range(8)
# Columns of a law, float64: the largest logit; a scale, log2(e) / temperature; the sum of
# 2 ** ((x - largest) * scale) over the kept logits x, NaN where a row is not finite; the smallest
# kept logit, and the largest kept id of those that have it; min-p.
LAW = 6
# A row is dealt to _LANES lanes and read _BLOCK logits at a time, several for each lane, so that
# enough loads are under way. At least _WIDE of the likeliest tokens are listed.
_LANES, _WIDE, _BLOCK = 2048, 512, 8192
# Tokens that are compared with all others at once.
_PART = 32


def asked_of(
    rows: npt.ArrayLike, size: int, samplings: Sequence[Sampling], siblings: int = 0
) -> npt.NDArray[np.float64]:
    """[R, DIGITS + 2 S]: what is asked of rows; all but `DISTINCT` and digits are filled in."""
    asked = np.zeros((len(samplings), DIGITS + 2 * siblings))
    asked[:, ROW], asked[:, SIZE] = rows, size
    asked[:, TEMPERATURE:DISTINCT] = [(s.temperature, s.top_k, s.top_p, s.min_p) for s in samplings]
    return asked


def laws(logits: Tensor, asked: Tensor) -> Tensor:
    """[R, LAW] float64: the law of each row.

    Args:
        logits: [*, V].
        asked: [R, DIGITS or more], see `asked_of`.
    """
    found: Tensor = _laws(logits, asked)
    return found


def draw(
    logits: Tensor, asked: Tensor, taken: Tensor, mass: float, support: int, siblings: int
) -> Tensor:
    """Draw from rows that are truncated and rounded, as `Categorical.quantize` does.

    Args:
        logits: [*, V].
        asked: [R, DIGITS + 2 S], see `asked_of`.
        taken: [R, E] int64, tokens that are not drawn from a row, -1 for none.
        mass: share of a law that is kept.
        support: the most tokens of a row, 1 to `WIDEST`.
        siblings: S, draws of a row. Where nothing is left of it, the first of its taken tokens, or
            else of its drawn ones, comes again.

    Returns:
        [R, S + 2 K] int64: tokens; ids of the row that they were drawn from, the likeliest first;
        their weights, 0 for padding and where a row is not finite.
    """
    found: Tensor = _draw(logits, asked, taken, mass, support, siblings)
    return found


def parts_of(drawn: Tensor, siblings: int) -> tuple[Tensor, Categorical]:
    """The tokens [R * S] and the rows of what was drawn."""
    ids, weights = drawn[:, siblings:].chunk(2, 1)
    return drawn[:, :siblings].flatten(), Categorical(ids, weights)


def width_of(support: int, vocab_size: int) -> int:
    """K for `support` tokens: a power of two, 16 at least, since each K has its own kernel."""
    return max(16, 1 << (min(support, vocab_size) - 1).bit_length())


def processed(logits: Tensor, asked: Tensor) -> Tensor:
    """[R, V] probabilities of rows, see `process`."""
    each = asked.tolist()
    rows = logits[[int(one[ROW]) for one in each]]
    for row, one in zip(rows, each, strict=True):
        row[int(one[SIZE]) :] = -torch.inf
    return process(rows, [_sampling(one) for one in each])


def _sampling(asked: Sequence[float]) -> Sampling:
    temperature, top_k, top_p, min_p = asked[TEMPERATURE:DISTINCT]
    return Sampling(temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p)


def _laws_by_operators(logits: Tensor, asked: Tensor) -> Tensor:
    probs = processed(logits, asked)
    found = torch.empty(len(asked), LAW, dtype=torch.float64)
    for law, one, p in zip(found, asked.tolist(), probs, strict=True):
        row = logits[int(one[ROW])].to(p.dtype)
        kept = (p > 0).nonzero()[:, 0]
        if not len(kept):
            law[:] = torch.tensor([torch.nan] * LAW)
            continue
        last = row[kept].min()
        scale = math.log2(math.e) / max(one[TEMPERATURE] or 1.0, 1e-30)
        law[0], law[1], law[2] = row[kept].max(), scale, 1 / p.max()
        law[3], law[4], law[5] = last, kept[row[kept] == last].max(), 0.0
    return found


def _draw_by_operators(
    logits: Tensor, asked: Tensor, taken: Tensor, mass: float, support: int, siblings: int
) -> Tensor:
    """See `draw`."""
    width = width_of(support, logits.shape[1])
    rows = Categorical.quantize(processed(logits, asked), mass, min(support, logits.shape[1]))
    fill = (0, width - rows.ids.shape[1])
    ids, weights = pad(rows.ids, fill), pad(rows.weights, fill)
    left = weights.masked_fill((ids[:, None] == taken[..., None]).any(1), 0)
    digits = asked[:, DIGITS:].long().view(len(asked), siblings, 2)
    distinct = asked[:, DISTINCT, None] > 0
    instead = taken[:, 0] if taken.shape[1] else taken.new_full((len(asked),), -1)
    tokens: list[Tensor] = []
    for rank in range(siblings):
        found = Categorical(ids, left).draw(digits[:, rank])
        found = torch.where((left.sum(-1) > 0) | (instead < 0), found, instead)
        instead = torch.where(instead < 0, found, instead)
        tokens.append(found)
        left = left.masked_fill(distinct & (ids == found[:, None]), 0)
    return torch.cat((torch.stack(tokens, 1), ids, weights), 1)


def _find_by_triton(
    logits: Tensor, asked: Tensor, width: int, support: int
) -> tuple[Tensor, Tensor]:
    """The laws, and the likeliest tokens of each row in the kernels' form, in no order."""
    from tandem.kernels import triton_draws

    rows, room = len(asked), 4 * _LANES
    found = asked.new_empty(rows, LAW)
    values, places = logits.new_empty(rows, room), asked.new_empty(rows, room, dtype=torch.int32)
    likeliest = asked.new_empty(rows, width, dtype=torch.int64)
    triton_draws.find[(rows,)](
        logits,
        asked,
        found,
        values,
        places,
        likeliest,
        logits.stride(0),
        asked.shape[1],
        room,
        support,
        K=width,
        WIDE=max(_WIDE, width),
        SHIFT=_shift(logits),
        LANES=_LANES,
        BLOCK=_BLOCK,
        num_warps=16,
    )
    return found, likeliest


def _laws_by_triton(logits: Tensor, asked: Tensor) -> Tensor:
    return _find_by_triton(logits, asked, 0, 0)[0]


def _draw_by_triton(
    logits: Tensor, asked: Tensor, taken: Tensor, mass: float, support: int, siblings: int
) -> Tensor:
    from tandem.kernels import triton_draws

    width = width_of(support, logits.shape[1])
    found, likeliest = _find_by_triton(logits, asked, width, min(support, logits.shape[1]))
    drawn = asked.new_empty(len(asked), siblings + 2 * width, dtype=torch.int64)
    triton_draws.pick[(len(asked),)](
        likeliest,
        found,
        asked,
        taken,
        drawn,
        mass,
        asked.shape[1],
        taken.shape[1],
        siblings,
        K=width,
        SHIFT=_shift(logits),
        PART=min(_PART, width),
        num_warps=8,
    )
    return drawn


def _shift(logits: Tensor) -> int:
    """Last bits of a number, as float32, that are zero in its dtype."""
    return {torch.bfloat16: 16, torch.float16: 13}.get(logits.dtype, 0)


def _laws_shapes(logits: Tensor, asked: Tensor) -> Tensor:
    require_one_device(logits, asked)
    return asked.new_empty(len(asked), LAW)


def _draw_shapes(
    logits: Tensor, asked: Tensor, taken: Tensor, mass: float, support: int, siblings: int
) -> Tensor:
    require_one_device(logits, asked, taken)
    return taken.new_empty(len(asked), siblings + 2 * width_of(support, logits.shape[1]))


def require_one_device(*given: Tensor) -> None:
    """What an operator for fake tensors checks, since no launch does.

    Raises:
        RuntimeError: the tensors are on more than one device.
    """
    if len(devices := {tensor.device for tensor in given}) > 1:
        raise RuntimeError(f"draws from tensors on more than one device: {devices}")


_laws: Any = register(
    "laws(Tensor logits, Tensor asked) -> Tensor", _laws_by_operators, _laws_by_triton, _laws_shapes
)
_draw: Any = register(
    "draw(Tensor logits, Tensor asked, Tensor taken, float mass, int support, int siblings)"
    " -> Tensor",
    _draw_by_operators,
    _draw_by_triton,
    _draw_shapes,
)
