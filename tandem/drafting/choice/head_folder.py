"""What drafts with a folder that is a head's: known by its files, without torch."""

from __future__ import annotations

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


def head_folder(folder: str) -> HeadFolder | None:
    """What a folder needs; None where it is no head's.

    Raises:
        StartupError: its configuration is broken.
    """
    files = head_files(folder)
    return None if files is None else HeadFolder(files.family, files.reads)
