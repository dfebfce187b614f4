"""The files of a head: which family a folder has, its configuration and its weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tandem.errors import StartupError, first_line

# By what a folder is known as a head's: keys of its configuration, or names of its tensors. EAGLE's
# configuration is that of any Llama.
_KEYS = {"medusa_num_heads": "medusa", "hydra_num_heads": "hydra"}
_TENSORS = {"fc.weight": "eagle"}
_OF_EAGLE_3 = ("midlayer.", "layers.0.hidden_norm.")
_MODEL_TYPES = {"medusa": "medusa"}
_LOOKED_FOR = {
    "medusa": "a config.json with medusa_num_heads",
    "hydra": "a config.json with hydra_num_heads",
    "eagle": "*.safetensors with fc.weight",
}
# What names a kind of drafter that there is no head for: keys and values of a configuration.
_OTHERS = ("dflash", "dspark", "peagle", "domino")
# Tensors that nothing depends on, by the ends of their names.
_HARMLESS = ("t2d", "rotary_emb.inv_freq")
# Names in a sentence.
_SHOWN = 3
_MOST_BYTES = 1 << 20  # of a configuration
_MOST_HEADER = 1 << 26  # of a file of tensors


@dataclass(frozen=True)
class HeadFiles:
    """A head's folder.

    Attributes:
        path: the folder.
        family: "medusa", "hydra" or "eagle".
        config: as in config.json.
        own: what our training wrote beside the published keys; empty for a published head.
    """

    path: Path
    family: str
    config: Mapping[str, Any]

    def feedback(self, target_layers: int) -> str:
        """The target's layers whose states it is fed, as the setting FEEDBACK has them.

        Args:
            target_layers: how many the target has; 0 if it is unknown.

        Raises:
            StartupError: it is unknown, and the result depends on it.
        """
        if not self.is_fused:
            return "last"
        if not target_layers and not self._named_layers:
            raise StartupError(
                f"the head {self.path} does not say which layers of its target it reads: set"
                " TANDEM_TARGET_FEEDBACK (EAGLE-3 reads 2, half of the layers, all but 3)"
            )
        return ",".join(map(str, self.layers_of(target_layers)))

    def layers_of(self, target_layers: int) -> tuple[int, ...]:
        """The same as numbers: the output of layer i is i, and after the final norm 1 more."""
        if not self.is_fused:
            return (target_layers + 1,)
        found = self._named_layers or (2, target_layers // 2, target_layers - 3)
        if len(set(found)) < len(found) or min(found) < 0 or max(found) > target_layers > 0:
            raise StartupError(
                f"the head {self.path} reads the layers {list(found)} of a target with"
                f" {target_layers}"
            )
        return found

    @property
    def _named_layers(self) -> tuple[int, ...]:
        """Layers that its files name, in our numbers; none where they name none.

        The authors and speculators number them as we do. Those nested in `eagle_config` (SpecForge,
        NVIDIA, lmsys) count layers from 0. A key of ours overrides both.
        """
        inner = self.config.get("eagle_config")
        inner = inner if isinstance(inner, dict) else {}
        key = "eagle_aux_hidden_state_layer_ids"
        if own := self.own.get("layers"):
            return tuple(map(int, own))
        if flat := self.config.get(key):
            return tuple(map(int, flat))
        return tuple(int(layer) + 1 for layer in inner.get(key) or ())

    @property
    def is_fused(self) -> bool:
        """Whether it fuses several layers of the target, as EAGLE-3 does."""
        return self.family == "eagle" and any(n.startswith(_OF_EAGLE_3) for n in self.names)

    @property
    def layer_config(self) -> dict[str, Any]:
        """The configuration of an EAGLE's layer."""
        inner = self.config.get("transformer_layer_config", self.config)
        return {key: value for key, value in inner.items() if key != "tandem"}

    @property
    def normed_residual(self) -> bool:
        """Whether EAGLE-3's residual is taken after the norm: speculators' default."""
        speculators = "speculators_model_type" in self.config
        return bool(self.config.get("norm_before_residual", speculators))

    @property
    def normed_output(self) -> bool:
        """Whether EAGLE-3's guesses are taken after the norm."""
        return bool(self.config.get("norm_output", False))

    @cached_property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(_names_in(self.path))

    @property
    def own(self) -> Mapping[str, Any]:
        """See the attributes."""
        own = self.config.get("tandem", {})
        return own if isinstance(own, dict) else {}

    def require_all_read(self, rest: Iterable[str]) -> None:
        """Refuse tensors that the family has no place for: the head would draft without them.

        Args:
            rest: names of what was not read.

        Raises:
            StartupError: some are left.
        """
        left = sorted(name for name in rest if not name.endswith(_HARMLESS))
        if left:
            more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
            raise StartupError(
                f"the head {self.path} is none of {self.family}'s that are known here: its tensors"
                f" {', '.join(left[:_SHOWN])}{more} would be left out"
            )

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
    _require_known(path, config)
    family = _MODEL_TYPES.get(config.get("model_type", ""), "")
    for key, known in _KEYS.items():
        if key in config:
            family = known
    if not family:
        names = _names_in(path)
        family = next((known for name, known in _TENSORS.items() if name in names), "")
    return HeadFiles(path, family, config) if family else None


def _require_known(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a drafter of a kind that would be read as another one.

    Raises:
        StartupError: which kind it is.
    """
    architectures = config.get("architectures")
    named = [*architectures] if isinstance(architectures, list) else []
    named += [str(config.get("speculators_model_type", ""))]
    named += [name.removesuffix("_config") for name in config if name.endswith("_config")]
    kind = next((str(n) for n in named if str(n).lower().startswith(_OTHERS)), None)
    if kind is not None:
        raise StartupError(
            f"{path} is a drafter of the kind {kind}, which Tandem does not have: draft with a"
            " small model, or with a head of Medusa, Hydra or EAGLE"
        )


def _names_in(folder: Path) -> set[str]:
    """The names of a folder's tensors, from the heads of its files.

    Raises:
        StartupError: a file is torn.
    """
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > _MOST_HEADER:
                    raise ValueError("its header is too long")
                names |= json.loads(file.read(size)).keys()
        except (OSError, ValueError, AttributeError) as error:
            raise StartupError(f"cannot read the weights {path}: {first_line(error)}") from None
    return names


def require_head(folder: str, family: str) -> HeadFiles:
    """The files of a head of a family.

    Raises:
        StartupError: what the folder is instead.
    """
    files = head_files(folder)
    if files is None:
        there = "is no head" if Path(folder, "config.json").is_file() else "has no config.json"
        raise StartupError(
            f"the head {folder} {there}: one of {family} is a folder with {_LOOKED_FOR[family]}"
        )
    if files.family != family:
        raise StartupError(f"the head {folder} is a {files.family} head: set METHOD={files.family}")
    return files
