"""Traced structures on disk, so that a model is traced once on a machine.

Only structures are stored: weights are read from the checkpoint each time, so no file can hold old
ones. The folder's name is a hash of everything a structure depends on. A checksum guards against
files that changed after they were written.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import openvino as ov
import structlog
from transformers import PreTrainedModel

from tandem.errors import first_line
from tandem.inference.disk_cache import cache_folder, structure_key
from tandem.inference.hidden_states import Layers
from tandem.inference.openvino.paged_pass import core

_log = structlog.get_logger(__name__)

_FILES = ("graph.xml", "graph.bin", "sha256")


def kept(
    model: PreTrainedModel,
    make: Callable[[PreTrainedModel, Layers], ov.Model],
    of_layers: Layers = (),
) -> ov.Model:
    """The model's structure from disk; else it is made, and written to disk if possible.

    Trouble with the disk gives one warning, and the structure is made.

    Raises:
        Exception: from `make`.
    """
    wrong = None
    try:
        folder = cache_folder() / structure_key(model, of_layers)
        found = _read(folder)
        if found is not None:
            return found
    except Exception as error:  # no home, no permission, no graph: OpenVINO may raise anything
        wrong = error
    structure = make(model, of_layers)
    try:
        _write(structure, cache_folder() / structure_key(model, of_layers))
    except Exception as error:
        wrong = wrong or error
    if wrong is not None:
        reason = f"{type(wrong).__name__}: {first_line(wrong)}"
        _log.warning("the kept graph of this model cannot be used; it is made again", reason=reason)
    return structure


def _read(folder: Path) -> ov.Model | None:
    """The stored graph; None if there is none."""
    if not folder.exists():
        return None
    graph, constants, total = (folder / name for name in _FILES)
    if total.read_text() != _sum(graph, constants):
        raise ValueError(f"{folder} is not what was written")
    return core().read_model(graph, constants)


def _write(structure: ov.Model, folder: Path) -> None:
    """Write to a temporary folder, then move that to its place in one step.

    If two services start at once, either may win.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        beside = Path(scratch) / folder.name
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
