"""Folder and keys of what earlier starts have learnt about models."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from transformers import PreTrainedModel

from tandem.inference.hidden_states import Layers

# Increment it whenever `openvino/trace.py` makes different graphs.
_FORM = 2
_LIBRARIES = ("openvino", "torch", "transformers")


def cache_folder() -> Path:
    """The cache folder: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tandem" / "openvino"


def structure_key(model: PreTrainedModel, of_layers: Layers = ()) -> str:
    """Hash of everything a structure depends on: configuration, shapes of weights, versions, and
    the layers whose hidden states it gives."""
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in ("_name_or_path", "dtype", "torch_dtype")
    }
    parts = [_FORM, type(model).__qualname__, config, shapes, _versions(), platform.machine()]
    parts += of_layers
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache  # reading them takes 10 ms
def _versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
