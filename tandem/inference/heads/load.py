"""A head from a folder: the table of families."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.errors import StartupError, first_line
from tandem.inference.fingerprint import tokenizer_fingerprint
from tandem.inference.heads.eagle import EagleHead
from tandem.inference.heads.files import require_head
from tandem.inference.heads.head import Head, HeadSource
from tandem.inference.heads.hydra import HydraHead
from tandem.inference.heads.medusa import MedusaHead
from tandem.inference.heads.target_parts import TargetParts
from tandem.inference.kv.size import Room
from tandem.inference.loading.checkpoint import CheckpointSource
from tandem.inference.loading.learnt_weights import NOTHING_LEARNT
from tandem.inference.loading.weights import device_of, read_tokenizer

FAMILIES: dict[str, Callable[[HeadSource], Head]] = {
    "medusa": MedusaHead,
    "hydra": HydraHead,
    "eagle": EagleHead,
}


def load_head(source: CheckpointSource, family: str, target: str, room: Room) -> Head:
    """A head, measured.

    Args:
        source: of the head's folder, unchanged but for learnt weights; the dtype "auto" is float32
            on a CPU, else bfloat16.
        family: a name of the table.
        target: directory or hub id of the checkpoint that it is for; empty where the head's files
            say all that is needed.
        room: for what it holds of sequences.

    Raises:
        OtherCheckpoint: weights were learnt from another head.
        StartupError: one sentence on what is missing or does not fit.
    """
    files = require_head(source.model, family)
    parts, tokenizer = None, ""
    if target:
        parts = TargetParts(target)
        parts.require()
        tokenizer = tokenizer_fingerprint(read_tokenizer(target))
    device, dtype = device_of(source.device), source.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    made_of = HeadSource(files, parts, tokenizer, device, getattr(torch, dtype), room)
    try:
        head = FAMILIES[family](made_of)
        head.measure()
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        said = f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)
        raise StartupError(f"the head {files.path} cannot be loaded as {family}: {said}") from error
    if source.learnt != NOTHING_LEARNT:
        head.with_learnt(source.learnt)()
    return head
