"""Attention of a batch in one call: tried at the start, to see if the device can, and compiled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import structlog
import torch
from transformers import PreTrainedModel

from tandem.errors import first_line
from tandem.inference.batch.tiles import BLOCK, FEW
from tandem.inference.compatibility import compare, max_positions
from tandem.inference.feed import Feed
from tandem.inference.hidden_states import Layers
from tandem.inference.kv.pool import KVPool
from tandem.inference.output import PassOutput
from tandem.inference.passes.backend import PROBE, Backend, Pass, probe, probe_tree, some_tokens

_log = structlog.get_logger(__name__)

# Numbers of texts of the batches for which attention in one call is compiled. From 128 rows (eight
# small tiles) on it is compiled separately, and also if two sizes happen to be equal, which the
# compiler takes for a rule.
_TOGETHER = (3, 9, 10)
# More than four, since numbers of blocks are rounded up to multiples of four (`tiles.py`).
_MANY_BLOCKS = 5


def worthwhile(device: torch.device) -> bool:
    """Whether attention of many sequences in one call may be worth its compilation time."""
    return device.type == "cuda"


def in_one_call(
    model: PreTrainedModel,
    compute: Pass,
    of_layers: Layers,
    text: Sequence[int],
    expected: PassOutput,
    sibling: PassOutput | None = None,
) -> Backend | None:
    """A back end whose attention takes all sequences of a batch at once.

    Args:
        model: to compute.
        compute: its pass.
        of_layers: whose hidden states the pass gives.
        text: longer than a block, if the model allows it.
        expected: plain rows of `text`.
        sibling: plain rows of `SIBLING`, if sequences may have branches; with None, batches with
            branches take one call per sequence.

    Returns:
        The back end; None, and one warning, if that fails: flex attention takes no heads smaller
        than 16, and needs a device that Triton supports.
    """
    try:
        pool = KVPool((_MANY_BLOCKS + 2 * max(_TOGETHER)) * BLOCK, BLOCK)
        backend = Backend(
            "torch",
            model.dtype,
            compute,
            pool,
            model.device,
            of_layers=of_layers,
            in_one_call=True,
        )
        for part in (text[: len(PROBE)], text):
            compare(model, expected.first(len(part)), probe(backend, part))
        at_most = max_positions(model.config.get_text_config()) - 1
        _compile(backend, at_most)
    except Exception as error:  # the compiler may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        _log.warning("attention takes one call a text and layer, not one a layer", reason=reason)
        return None
    if sibling is not None:
        try:
            backend.branches_in_one_call = True
            compare(model, *probe_tree(backend, expected, sibling))
            _compile(backend, at_most, branches=True)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            _log.warning("attention of trees takes one call a text and layer", reason=reason)
            backend.branches_in_one_call = False
    return backend


def _compile(backend: Backend, at_most: int, branches: bool = False) -> None:
    """Feed batches of all kinds, so that no later batch waits for the compiler: with few and many
    rows per text, few and many blocks per text, few and many tiles.

    Args:
        backend: whose attention is compiled.
        at_most: most tokens of a text.
        branches: whether to feed batches with branches too.
    """
    longest, short = (min(length, at_most) for length in (_MANY_BLOCKS * BLOCK, FEW + 1))
    for count, first in itertools.product(_TOGETHER, (longest, short)):
        lengths = [first] + [short] * (count - 1)
        caches = [backend.pool.reserve(length + 1) for length in lengths]
        for fed in (lengths, [1] * count):
            feeds = [
                Feed(cache, some_tokens(rows), 1) for cache, rows in zip(caches, fed, strict=True)
            ]
            backend.forward(feeds)
        for rows in (2, short) if branches else ():
            for cache in caches:
                cache.rollback(max(0, cache.length - rows))
            backend.forward([Feed(c, some_tokens(rows), 1, (0,) * rows) for c in caches])
        for cache in caches:
            backend.pool.release(cache)
