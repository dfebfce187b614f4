"""Traced structures on disk, so that a model is traced once on a machine.

Only structures: weights are read from the checkpoint each time, so a file cannot hold old ones.
What a structure depends on is in its file's name; what is not what it was when it was written
is not read.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import openvino as ov
import structlog
from transformers import PreTrainedModel

from tandem.errors import first_line
from tandem.inference.openvino_trace import weights_of

_log = structlog.get_logger(__name__)

# To be raised whenever `openvino_trace.py` makes other graphs.
_FORM = 1
_FILES = ("graph.xml", "graph.bin", "sha256")
_LIBRARIES = ("openvino", "torch", "transformers")


def cache_folder() -> Path:
    """Where structures are kept: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tandem" / "openvino"


def kept(model: PreTrainedModel, make: Callable[[PreTrainedModel], ov.Model]) -> ov.Model:
    """The model's structure from disk, or else made, and then written if it can be.

    Whatever is wrong with the disk is one warning, and the structure is made.

    Raises:
        Exception: as `make` does.
    """
    wrong = None
    try:
        folder = cache_folder() / _key(model)
        found = _read(folder)
        if found is not None:
            return found
    except Exception as error:  # no home, no rights, no graph: OpenVINO raises what it likes
        wrong = error
    structure = make(model)
    try:
        _write(structure, cache_folder() / _key(model))
    except Exception as error:
        wrong = wrong or error
    if wrong is not None:
        reason = f"{type(wrong).__name__}: {first_line(wrong)}"
        _log.warning("the kept graph of this model cannot be used; it is made anew", reason=reason)
    return structure


def _key(model: PreTrainedModel) -> str:
    """Of all that a structure depends on: configuration, shapes of weights, and versions."""
    shapes = {name: list(weight.shape) for name, weight in weights_of(model).items()}
    config = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in ("_name_or_path", "dtype", "torch_dtype")
    }
    versions = {name: version(name) for name in _LIBRARIES}
    parts = [_FORM, type(model).__qualname__, config, shapes, versions, platform.machine()]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(folder: Path) -> ov.Model | None:
    """The graph; None where none is kept."""
    if not folder.exists():
        return None
    graph, constants, total = (folder / name for name in _FILES)
    if total.read_text() != _sum(graph, constants):
        raise ValueError(f"{folder} is not what was written")
    return ov.Core().read_model(graph, constants)


def _write(structure: ov.Model, folder: Path) -> None:
    """Write it beside its place and move it there, whole.

    Of two services that start at once, either may win.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        beside = Path(place) / folder.name
        beside.mkdir()
        graph, constants, total = (beside / name for name in _FILES)
        ov.save_model(structure, graph, compress_to_fp16=False)
        total.write_text(_sum(graph, constants))
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)


def _sum(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()
