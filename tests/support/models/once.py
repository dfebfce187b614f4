"""Checkpoints that services of one process load again and again: read and checked once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tandem.inference.check.plain import Plain, plain_rows
from tandem.inference.check.probe import Comparison, probe, probe_tree
from tandem.inference.choice import candidates
from tandem.inference.feed import Feed
from tandem.inference.loading import checkpoint
from tandem.inference.loading.weights import read_model
from tandem.inference.passes.torch_llama import LlamaPass

_READ: dict[Any, PreTrainedModel] = {}
_PLAIN: dict[Any, Plain] = {}
_COMPARED: dict[Any, Comparison] = {}


def load_once(patch: pytest.MonkeyPatch) -> None:
    """Models of equal files are copies of the first, and one of equal weights that was found right
    is right. Not for tests of the start's own check, or of a wrong pass."""
    patch.setattr(checkpoint, "read_model", _read)
    patch.setattr(candidates, "plain_rows", _plain)
    for check in (probe, probe_tree):
        patch.setattr(candidates, check.__name__, _compared(check))


def _read(model: str, device: str, dtype: str) -> PreTrainedModel:
    files = [(path, path.stat().st_mtime_ns) for path in sorted(Path(model).glob("*"))]
    key = model, device, dtype, *files
    if not files:
        return read_model(model, device, dtype)
    if key not in _READ:
        _READ[key] = read_model(model, device, dtype)
    return copy.deepcopy(_READ[key])


def _plain(model: PreTrainedModel, *asked: Any, **options: Any) -> Plain:
    if not LlamaPass.fits(model):  # its pass is the modules', which the plain ones set up
        return plain_rows(model, *asked, **options)
    weights = [float(each.sum(dtype=torch.float64)) for each in model.parameters()]
    key = type(model), model.dtype, *weights, *asked, *options.items()
    if key not in _PLAIN:
        _PLAIN[key] = plain_rows(model, *asked, **options)
    return _PLAIN[key]


def _compared(check: Any) -> Any:
    def compare(backend: Any, plain: Plain, *length: int) -> Comparison:
        key = check, str(backend), id(plain), *length
        if not any(plain is kept for kept in _PLAIN.values()):
            found: Comparison = check(backend, plain, *length)
            return found
        if key in _COMPARED:
            cache = backend.pool.reserve(1)  # the pool learns its widths from a first pass
            backend.forward([Feed(cache, [0], 1)])
            backend.pool.release(cache)
        else:
            _COMPARED[key] = check(backend, plain, *length)
        return _COMPARED[key]

    return compare
