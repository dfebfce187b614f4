"""A head from a folder: the table of families."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.errors import StartupError, first_line
from tandem.inference.fingerprint import tokenizer_fingerprint
from tandem.inference.heads.eagle import EagleHead
from tandem.inference.heads.files import require_head
from tandem.inference.heads.head import Head, Room, Source
from tandem.inference.heads.hydra import HydraHead
from tandem.inference.heads.medusa import MedusaHead
from tandem.inference.heads.target_parts import TargetParts
from tandem.inference.loading.checkpoint import device_of, read_tokenizer

FAMILIES: dict[str, Callable[[Source], Head]] = {
    "medusa": MedusaHead,
    "hydra": HydraHead,
    "eagle": EagleHead,
}


def load_head(folder: str, family: str, target: str, device: str, dtype: str, room: Room) -> Head:
    """A head, measured.

    Args:
        folder: of the head.
        family: a name of the table.
        target: directory or hub id of the checkpoint that it is for; empty where the head's files
            say all that is needed.
        device: as torch names it.
        dtype: a name; "auto" is float32 on a CPU, else bfloat16.
        room: for what it holds of sequences.

    Raises:
        StartupError: one sentence on what is missing or does not fit.
    """
    files = require_head(folder, family)
    parts, tokenizer = None, ""
    if target:
        parts = TargetParts(target)
        parts.require()
        tokenizer = tokenizer_fingerprint(read_tokenizer(target))
    where = device_of(device)
    if dtype == "auto":
        dtype = "float32" if where.type == "cpu" else "bfloat16"
    source = Source(files, parts, tokenizer, where, getattr(torch, dtype), room)
    try:
        head = FAMILIES[family](source)
        head.measure()
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        said = f"it lacks {error}" if isinstance(error, KeyError) else first_line(error)
        raise StartupError(f"the head {files.path} cannot be loaded as {family}: {said}") from error
    return head
