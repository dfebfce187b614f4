"""What drafts with a folder that is a head's: known by its files, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from tandem.inference.heads.files import head_files


class HeadFolder(NamedTuple):
    """What has to be set for a head.

    Attributes:
        method: that drafts with it.
        feedback: layers of the target that it reads, as the target's FEEDBACK has them.
    """

    method: str
    feedback: str


def head_folder(folder: str, target: str) -> HeadFolder | None:
    """What a folder needs; None where it is no head's.

    Args:
        folder: of the head.
        target: directory or hub id of its target.

    Raises:
        StartupError: its files are broken.
    """
    files = head_files(folder)
    return None if files is None else HeadFolder(files.family, files.feedback(_layers_of(target)))


def _layers_of(target: str) -> int:
    """Layers of a model; 0 where its configuration is not at hand."""
    try:
        config = json.loads((Path(target) / "config.json").read_text())
        return int(config["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
