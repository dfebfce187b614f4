"""What drafts with a folder that is a head's: known by its files, without torch."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.inference.heads.files import head_files


def method_of(folder: str) -> str:
    """The method that drafts with a folder's head; empty where it is no head's.

    Raises:
        StartupError: its files are broken.
    """
    files = head_files(folder) if folder else None
    return "" if files is None else files.family


def feedback_of(folder: str, target: str) -> str:
    """Layers of the target that a head reads, as the target's FEEDBACK has them.

    Args:
        folder: of a head.
        target: directory or hub id of its target.

    Raises:
        StartupError: it is not said which.
    """
    files = head_files(folder)
    assert files is not None
    return files.feedback(_layers_of(target))


def _layers_of(target: str) -> int:
    """Layers of a model; 0 where its configuration is not at hand."""
    try:
        config = json.loads((Path(target) / "config.json").read_text())
        return int(config.get("text_config", config)["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
