"""Where a model's checkpoint is: a directory, or an id that a model hub may know."""

from __future__ import annotations

import os
import re

from tandem.failure import Misconfigured

_HUB_ID = re.compile(r"(\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", re.ASCII)


def located(service: str, model: str) -> str:
    """A directory with a checkpoint, with `~` expanded, or a hub id as it was given.

    A service would find out too, but only after loading its libraries and asking a hub.

    Args:
        service: that is to load it.
        model: directory or hub id.

    Raises:
        Misconfigured: it can only be a directory, and there is no checkpoint.
    """
    folder = os.path.expanduser(model)
    is_path = model.startswith((".", "~")) or os.path.isabs(model) or os.path.isdir(folder)
    if not is_path and _HUB_ID.fullmatch(model):
        return model
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise Misconfigured(
            f"{service}: cannot load the model {model!r}: no directory of that name has a"
            " config.json"
        )
    return folder
