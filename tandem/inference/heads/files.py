"""The files of a head: which family a folder has, its configuration and its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import StartupError, first_line

# Keys of a configuration by which the authors' own files are known, and their family.
_KNOWN_BY = {"medusa_num_heads": "medusa"}
_MODEL_TYPES = {"medusa": "medusa"}
_MOST_BYTES = 1 << 20  # of a configuration


@dataclass(frozen=True)
class HeadFiles:
    """A head's folder.

    Attributes:
        path: the folder.
        family: "medusa", ...
        config: as in config.json.
        own: what our training wrote beside the published keys; empty for a published head.
    """

    path: Path
    family: str
    config: Mapping[str, Any]

    @property
    def reads(self) -> str:
        """The target's layers whose states it is fed, as the setting FEEDBACK has them."""
        return "last"

    @property
    def own(self) -> Mapping[str, Any]:
        """See the attributes."""
        own = self.config.get("tandem", {})
        return own if isinstance(own, dict) else {}

    def tensors(self) -> dict[str, Any]:
        """All tensors of the folder, by their names.

        Raises:
            StartupError: there are none, or a file is torn.
        """
        from safetensors.torch import load_file  # heads are looked for where torch is missing

        paths = sorted(self.path.glob("*.safetensors"))
        if not paths:
            pickles = sorted(p.name for p in self.path.iterdir() if p.suffix in (".pt", ".bin"))
            if not pickles:
                raise StartupError(f"the head {self.path} has no weights, *.safetensors")
            raise StartupError(
                f"the head {self.path} has its weights in {pickles[0]}, a pickle, which can run"
                " code; convert it: save_file(torch.load(FILE, weights_only=True),"
                " 'model.safetensors') with safetensors.torch"
            )
        tensors: dict[str, Any] = {}
        for path in paths:
            try:
                tensors |= load_file(path)
            except Exception as error:  # the reader's own exceptions, of any kind
                raise StartupError(
                    f"cannot read the head's weights {path}: {first_line(error)}"
                ) from error
        return tensors


def head_files(folder: str) -> HeadFiles | None:
    """A folder as a head's; None where it is none.

    Raises:
        StartupError: its configuration is broken.
    """
    path = Path(folder)
    try:
        with (path / "config.json").open("rb") as file:
            config = json.loads(file.read(_MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path / 'config.json'}: {first_line(error)}") from None
    if not isinstance(config, dict):
        return None
    family = _MODEL_TYPES.get(config.get("model_type", ""), "")
    for key, known in _KNOWN_BY.items():
        if key in config:
            family = known
    return HeadFiles(path, family, config) if family else None


def require_head(folder: str, family: str) -> HeadFiles:
    """The files of a head of a family.

    Raises:
        StartupError: what the folder is instead.
    """
    files = head_files(folder)
    if files is None:
        there = "is no head" if Path(folder, "config.json").is_file() else "has no config.json"
        keys = ", ".join(key for key, known in _KNOWN_BY.items() if known == family)
        raise StartupError(
            f"the head {folder} {there}: a {family} head is a folder whose config.json has {keys}"
        )
    if files.family != family:
        raise StartupError(f"the head {folder} is a {files.family} head: set METHOD={files.family}")
    return files
