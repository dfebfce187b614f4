"""A model's identity in 64 characters: of its law, and of its weights, however precise."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tandem.vocabulary import vocabulary_fingerprint

# A core hashes 0.6 to 2 GB/s; more threads would wait for the memory, or for the device.
_MOST_THREADS = 16
# Keys of a configuration that tell its origin, and not what the model computes.
_ORIGIN = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


class Fingerprints(NamedTuple):
    """Of a loaded model, SHA-256 each. Files may be split and named in any way.

    Attributes:
        model: of weights as loaded, configuration, the generation config's end-of-text ids and
            tokenizer hash: another dtype gives another one.
        weights: of weights rounded to bfloat16, and configuration: the same in float32 and
            bfloat16.
    """

    model: str = ""
    weights: str = ""


def fingerprints(model: PreTrainedModel, tokenizer: str) -> Fingerprints:
    """See `Fingerprints`.

    Args:
        model: loaded, with its weights.
        tokenizer: its hash.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _ORIGIN}
    ends = model.generation_config.eos_token_id if model.generation_config else None
    tensors = sorted(model.state_dict().items())
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as threads:
        digests = list(threads.map(_digests, (tensor for _, tensor in tensors)))
    names = [name for name, _ in tensors]
    loaded, rounded = zip(*digests, strict=True)
    return Fingerprints(
        _sha256([list(zip(names, loaded, strict=True)), config, ends, tokenizer]),
        _sha256([list(zip(names, rounded, strict=True)), config]),
    )


def tensors_fingerprint(tensors: Mapping[str, Tensor], others: object) -> str:
    """SHA-256 over tensors with their names, and what else decides what they compute."""
    return _sha256([[(name, digest(tensors[name])) for name in sorted(tensors)], others])


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over the token-to-id table, which must be equal in a pair; "" for None."""
    if tokenizer is None:
        return ""
    return vocabulary_fingerprint(tokenizer.get_vocab())


def _digests(tensor: Tensor) -> tuple[str, str]:
    """Of a tensor as it is, and rounded to bfloat16."""
    own = digest(tensor)
    if not tensor.is_floating_point() or tensor.dtype == torch.bfloat16:
        return own, own
    return own, digest(tensor.to(torch.bfloat16))


def digest(tensor: Tensor) -> str:
    """Hash of a tensor's dtype, shape and bytes."""
    head = f"{tensor.dtype} {list(tensor.shape)} "
    raw: Any = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(head.encode() + hashlib.sha256(raw).digest()).hexdigest()


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()
