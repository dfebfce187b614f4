"""A model's identity in 64 characters: equal if, and only if, the model's law is equal."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# A core hashes about 2 GB/s; more threads would wait for the memory, or for the device.
_MOST_THREADS = 8
# Keys of a configuration that tell its origin, and not what the model computes.
_ORIGIN = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def model_fingerprint(model: PreTrainedModel, tokenizer: str) -> str:
    """SHA-256 over a loaded model's weights, configuration, end-of-text ids and tokenizer hash.

    Weights are hashed as loaded, so files may be split and named in any way, but another dtype
    gives another fingerprint.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _ORIGIN}
    ends = model.generation_config.eos_token_id if model.generation_config else None
    tensors = sorted(model.state_dict().items())
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as threads:
        digests = list(threads.map(_digest, (tensor for _, tensor in tensors)))
    names = [name for name, _ in tensors]
    return _sha256([list(zip(names, digests, strict=True)), config, ends, tokenizer])


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 over the token-to-id table, which must be equal in a pair; "" for None."""
    if tokenizer is None:
        return ""
    return _sha256(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))


def _digest(tensor: Tensor) -> str:
    """Hash of a tensor's dtype, shape and bytes."""
    head = f"{tensor.dtype} {list(tensor.shape)} "
    raw: Any = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(head.encode() + hashlib.sha256(raw).digest()).hexdigest()


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()
