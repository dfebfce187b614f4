"""Attention of a batch in one call, by our own kernels: tried at the start on a device."""

from __future__ import annotations

import itertools

import structlog
import torch
from transformers import PreTrainedModel

from tandem.errors import first_line
from tandem.inference.batch.tiles import FEW, ONE
from tandem.inference.check.plain import Plain
from tandem.inference.check.probe import SHORT, probe, require_agreement
from tandem.inference.check.texts import ordinary_tokens
from tandem.inference.compatibility import max_positions
from tandem.inference.feed import Feed
from tandem.inference.kv.pool import KVPool
from tandem.inference.passes.backend import Backend

_log = structlog.get_logger(__name__)

# Texts of the batches for which kernels are compiled: one, whose positions are split, and enough
# for no split, even with a single key head.
_TOGETHER = (1, 161)
# Rows of each, for each size of a tile.
_ROWS = (1, ONE + 1, FEW + 1)


def worthwhile(device: torch.device) -> bool:
    """Whether to try attention of many sequences in one call."""
    return device.type == "cuda"


def in_one_call(model: PreTrainedModel, plain_calls: Backend, plain: Plain) -> Backend | None:
    """A back end whose attention takes all sequences of a batch at once.

    Args:
        model: to compute.
        plain_calls: the same pass with a call for each sequence.
        plain: the model's own rows.

    Returns:
        The back end; None, and one warning, if that fails: kernels need a device that Triton
        supports (compute capability 8.0 or more), and may not compile for each shape of heads.
    """
    try:
        length = len(plain.texts.first)
        backend = Backend(
            "torch",
            model.dtype,
            plain_calls.compute,
            KVPool(max(4 * length, max(_TOGETHER) * max(_ROWS)), plain_calls.pool.cycles),
            model.device,
            plain_calls.vocab_size,
            of_layers=plain_calls.of_layers,
            blocks=plain_calls.blocks,
            in_one_call=True,
        )
        for part in (min(SHORT, length), length):
            require_agreement(model, probe(backend, plain, part))
        _compile(backend, max_positions(model.config.get_text_config()) - 1)
    except Exception as error:  # the compiler may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        _log.warning("attention takes one call a text and layer, not one a layer", reason=reason)
        return None
    return backend


def _compile(backend: Backend, at_most: int) -> None:
    """Feed batches of all kinds, so that no later batch waits for the compiler: with few and many
    rows of a text, and few and many tiles.

    Args:
        backend: whose kernels are compiled.
        at_most: most tokens of a text.
    """
    for texts, rows in itertools.product(_TOGETHER, _ROWS):
        rows = min(rows, at_most)
        caches = [backend.pool.reserve(rows) for _ in range(texts)]
        tokens = ordinary_tokens(backend.vocab_size, rows)
        backend.forward([Feed(cache, tokens, 1) for cache in caches])
        for cache in caches:
            backend.pool.release(cache)
