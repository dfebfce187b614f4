"""Measures what the passes of a back end take, and what a dtype does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from tandem.errors import first_line
from tandem.inference.check.probe import Computes
from tandem.inference.check.texts import ordinary_tokens
from tandem.inference.feed import Feed
from tandem.inference.passes.backend import Backend
from tandem.profile import PassTime

_log = structlog.get_logger(__name__)

# As wide as no layer is, and vocabularies are.
_HEAD = 32_000
_FEW_WEIGHTS = 1 << 16
# Of a layer: more say nothing more of a dtype.
_MOST_OUTPUTS = 4096
# Positions before the rows that are timed.
CONTEXT = 64
# A profile: sequences in a pass, each with as many rows; more sequences only if there is
# time. A small model on a CPU takes half of it; a large one is loaded for far longer.
SEQUENCES, ROWS, _REPEATS, _PROFILE_SECONDS = (1, 4, 16), (1, 5, 17), 3, 2.0

# Of a pool in which all of them have room.
PROFILED_POSITIONS = SEQUENCES[-1] * (CONTEXT + ROWS[-1])

# A chunk of a prompt beside other texts, and the largest where there are none.
PROMPT_ROWS = (256, 2048)


def profile_of(backend: Computes, longest: int, prompts: Sequence[int] = ()) -> list[PassTime]:
    """What passes of an idle back end take, each with a short text before it.

    Args:
        backend: with its pool, of which nothing is reserved.
        longest: positions of its longest sequence.
        prompts: numbers of rows of one sequence alone, as a prompt has; fewer if that is longer
            than the longest sequence.

    Returns:
        For each number of sequences the same numbers of rows, as many as there is time for, and
        then the prompts; the best of three times.
    """
    context = min(CONTEXT, longest // 2)
    found = _of_few_rows(backend, longest, context)
    for rows in sorted({min(rows, longest - context) for rows in prompts}):
        cache = backend.pool.reserve(context + rows)
        if cache is None:
            continue
        try:
            found.append((1, rows, _best(backend, [cache], rows, context, wanted=1)))
        except RuntimeError as error:  # as if there were no room
            _log.warning("the rows of prompts are not measured", reason=first_line(error))
        finally:
            backend.pool.release(cache)
    return found


def _of_few_rows(backend: Computes, longest: int, context: int) -> list[PassTime]:
    shapes = [rows for rows in ROWS if context + rows <= longest]
    caches: list[Any] = []
    found: list[PassTime] = []
    until = time.perf_counter() + _PROFILE_SECONDS
    try:
        for sequences in SEQUENCES:
            level: list[PassTime] = []
            while len(caches) < sequences:
                cache = backend.pool.reserve(context + ROWS[-1])
                if cache is None or (found and time.perf_counter() > until):
                    return found
                caches.append(cache)
                backend.forward([Feed(cache, ordinary_tokens(backend.vocab_size, context), 0)])
            for rows in shapes:
                if found and time.perf_counter() > until:
                    return found  # all levels have the same rows
                level.append((sequences, rows, _best(backend, caches, rows, context)))
            found += level
        return found
    finally:
        for cache in caches:
            backend.pool.release(cache)


def _best(
    backend: Computes, caches: Sequence[Any], rows: int, context: int, wanted: int | None = None
) -> int:
    """The least nanoseconds of a pass with some rows of each sequence; for `wanted` see
    `timed`."""
    spent = [timed(backend, caches, (rows,), context, wanted) for _ in range(1 + _REPEATS)]
    return round(1e9 * min(spent[1:]))


def times_as_slow(model: PreTrainedModel) -> float:
    """How many times as long a model's largest layer takes in its dtype as in float32; 1 for a
    model so small that its operators take longer than their work.

    Args:
        model: on a CPU.
    """
    layers = [part for part in model.modules() if type(part) is nn.Linear]
    if not layers or model.dtype == torch.float32:
        return 1.0
    weight = max((layer.weight for layer in layers), key=_inner_size).detach()[:_MOST_OUTPUTS]
    if weight.numel() < _FEW_WEIGHTS:
        return 1.0
    times = []
    for own in (weight, weight.float()):
        rows = torch.ones(ROWS[1], own.shape[1], dtype=own.dtype)
        spent = []
        for _ in range(1 + _REPEATS):
            started = time.perf_counter()
            linear(rows, own)
            spent.append(time.perf_counter() - started)
        times.append(min(spent[1:]))
    return times[0] / times[1]


def _inner_size(weight: Tensor) -> int:
    """Of a layer; the head, which is as wide as the vocabulary, is last."""
    return weight.numel() if max(weight.shape) < _HEAD else 0


def is_whole(passes: Sequence[PassTime]) -> bool:
    """Whether nothing is missing in a profile."""
    return len(passes) == len(SEQUENCES) * len(ROWS)


def begun(backend: Backend, count: int) -> list[Any]:
    """Sequences with some context each, in a pool that is theirs."""
    caches = [backend.pool.reserve(CONTEXT + ROWS[-1]) for _ in range(count)]
    for cache in caches:
        backend.forward([Feed(cache, ordinary_tokens(backend.vocab_size, CONTEXT), 0)])
    return caches


def timed(
    backend: Computes,
    caches: Sequence[Any],
    rows: Sequence[int],
    context: int = CONTEXT,
    wanted: int | None = None,
) -> float:
    """Seconds of passes of some rows of each sequence, which are then forgotten. `wanted`: of how
    many of them there are logits; None for all."""
    fed = [
        [
            Feed(
                cache,
                ordinary_tokens(backend.vocab_size, count, seed),
                count if wanted is None else wanted,
            )
            for seed, cache in enumerate(caches, 1)
        ]
        for count in rows
    ]
    with backend.busy:  # not timed: waiting for a pass that serves
        started = time.perf_counter()
        for feeds in fed:
            output = backend.forward(feeds)
        output.logits[-1:].cpu()  # a device has computed when it can be read
        spent = time.perf_counter() - started
    for cache in caches:
        cache.rollback(context)
    return spent
