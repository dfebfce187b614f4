"""Attention of a batch in one call: tried at the start, to see if the device can, and compiled."""

from __future__ import annotations

import itertools

import structlog
import torch
from transformers import PreTrainedModel

from tandem.errors import first_line
from tandem.inference.batch.tiles import BLOCK, FEW
from tandem.inference.check.plain import Plain
from tandem.inference.check.probe import SHORT, probe, probe_tree, require_agreement
from tandem.inference.check.texts import ordinary_tokens
from tandem.inference.compatibility import max_positions
from tandem.inference.feed import Feed
from tandem.inference.kv.pool import KVPool
from tandem.inference.passes.backend import Backend

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
    model: PreTrainedModel, plain_calls: Backend, plain: Plain, trees: bool
) -> Backend | None:
    """A back end whose attention takes all sequences of a batch at once.

    Args:
        model: to compute.
        plain_calls: the same pass with a call for each sequence.
        plain: the model's own rows, of texts that are longer than a block if the model allows it.
        trees: whether sequences may have branches; if not, batches with branches take one call per
            sequence.

    Returns:
        The back end; None, and one warning, if that fails: flex attention takes no heads smaller
        than 16, and needs a device that Triton supports.
    """
    try:
        pool = KVPool((_MANY_BLOCKS + 2 * max(_TOGETHER)) * BLOCK, BLOCK)
        backend = Backend(
            "torch",
            model.dtype,
            plain_calls.compute,
            pool,
            model.device,
            plain_calls.vocab_size,
            of_layers=plain_calls.of_layers,
            blocks=plain_calls.blocks,
            in_one_call=True,
        )
        length = len(plain.texts.first)
        for part in (min(SHORT, length), length):
            require_agreement(model, probe(backend, plain, part))
        at_most = max_positions(model.config.get_text_config()) - 1
        _compile(backend, at_most)
    except Exception as error:  # the compiler may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        _log.warning("attention takes one call a text and layer, not one a layer", reason=reason)
        return None
    if trees:
        try:
            backend.branches_in_one_call = True
            require_agreement(model, probe_tree(backend, plain))
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
                Feed(cache, ordinary_tokens(backend.vocab_size, rows), 1)
                for cache, rows in zip(caches, fed, strict=True)
            ]
            backend.forward(feeds)
        for rows in (2, short) if branches else ():
            for cache in caches:
                cache.rollback(max(0, cache.length - rows))
            tokens = ordinary_tokens(backend.vocab_size, rows)
            backend.forward([Feed(c, tokens, 1, (0,) * rows) for c in caches])
        for cache in caches:
            backend.pool.release(cache)
