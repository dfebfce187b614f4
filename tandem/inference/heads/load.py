"""A head from a folder: the table of families."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.errors import StartupError, first_line
from tandem.inference.checkpoint import device_of, read_tokenizer
from tandem.inference.fingerprint import tokenizer_fingerprint
from tandem.inference.heads.eagle import EagleHead
from tandem.inference.heads.files import HeadFiles, require_head
from tandem.inference.heads.head import Head, Room
from tandem.inference.heads.hydra import HydraHead
from tandem.inference.heads.medusa import MedusaHead
from tandem.inference.heads.target_parts import TargetParts

Make = Callable[[HeadFiles, TargetParts | None, str, str, torch.dtype, Room], Head]
FAMILIES: dict[str, Make] = {"medusa": MedusaHead, "hydra": HydraHead, "eagle": EagleHead}


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
    if dtype == "auto":
        dtype = "float32" if device_of(device).type == "cpu" else "bfloat16"
    try:
        head = FAMILIES[family](files, parts, tokenizer, device, getattr(torch, dtype), room)
        head.measure()
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise StartupError(
            f"the head {files.path} cannot be loaded as {family}: {first_line(error)}"
        ) from error
    return head
