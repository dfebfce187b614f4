"""The pair of models to serve, and the settings that follow from it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoint_folder import gguf_advice
from tandem.checkpoint_memory import shares_of
from tandem.drafting.choice.head_folder import feedback_of, method_of
from tandem.drafting.drafter import OF_TARGET
from tandem.errors import StartupError
from tandem.failure import Misconfigured
from tandem.tools.local.process import ROOT
from tandem.vocabulary import difference

_HUB_ID = re.compile(r"(\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", re.ASCII)


def located(service: str, model: str) -> str:
    """A directory with a checkpoint, with `~` expanded, or a hub id as it was given.

    A service would notice a wrong name too, but only after loading its libraries and asking a hub.

    Args:
        service: that will load the model.
        model: directory or hub id.

    Raises:
        Misconfigured: the name can only be a directory's, and there is no checkpoint.
    """
    folder = os.path.expanduser(model)
    is_path = model.startswith((".", "~")) or os.path.isabs(model) or os.path.isdir(folder)
    if not is_path and _HUB_ID.fullmatch(model):
        return model
    if not os.path.isfile(os.path.join(folder, "config.json")):
        reason = gguf_advice(folder) or "no directory of that name has a config.json"
        raise Misconfigured(f"{service}: cannot load the model {model!r}: {reason}")
    return folder


def difference_of(models: Sequence[str]) -> str:
    """How the tokenizers of two checkpoints differ; empty where they do not, or where one is not in
    a directory here."""
    from tokenizers import Tokenizer

    files = [Path(model, "tokenizer.json") for model in models]
    try:
        vocabularies = [Tokenizer.from_file(str(file)).get_vocab() for file in files]
    except Exception:  # the library raises bare exceptions; the services have read what they need
        return ""
    return difference(*vocabularies)


NO_DRAFTER = "none"
# Drafts from the text itself, for a target without a drafter.
_ALONE = "lookup"
# Recipes that draft with a head of the embedded target, where one is there.
EMBEDDED_HEADS = ("medusa", "hydra", "eagle")
# What the user sets is left alone.
_FEEDBACK = "TANDEM_TARGET_FEEDBACK"
_SHARES = {"TANDEM_TARGET_MEMORY_SHARE", "TANDEM_DRAFTER_MEMORY_SHARE"}
_EMBEDDINGS = {"TANDEM_TARGET_EXTRA_EMBEDDINGS", "TANDEM_TARGET_ADAPTER"}


@dataclass(frozen=True)
class Pair:
    """Two checkpoints and how they are run. None takes the services' defaults.

    Attributes:
        target: directory or hub id; None is the embedded model.
        drafter: the same; "none" to decode plainly; "@target" for a part of the target, which then
            drafts.
        target_device: as torch names it.
        drafter_device: as torch names it.
        dtype: of both models.
        max_length: tokens a sequence may hold on both.
        draft_support: the most tokens of a drafted distribution.
        drafter_dtype: the drafter's, if it differs from `dtype`.
        recipe: what drafts: a built-in recipe or a file. It may need no model. None is "lookup"
            for a target without a drafter, else the drafter's own.
        inside: the target drafts, in its own process; the drafter's settings are the recipe's.
    """

    target: str | None = None
    drafter: str | None = None
    target_device: str | None = None
    drafter_device: str | None = None
    dtype: str | None = None
    max_length: int | None = None
    draft_support: int | None = None
    drafter_dtype: str | None = None
    recipe: str | None = None
    inside: bool = False

    def __post_init__(self) -> None:
        if self.drafter == OF_TARGET:  # which only the target itself has
            object.__setattr__(self, "inside", True)

    @property
    def shares_a_gpu(self) -> bool:
        """Whether a target and a drafter with a model are on the same one, as these options say, or
        else the environment."""
        return bool(self._drafter_model()) and self._shared_device.startswith("cuda")

    @property
    def _shared_device(self) -> str:
        """That of a target and of a drafter that may have a model; empty where they are on two."""
        files = Path(self._recipe or "").suffix  # may name models of their own
        if self.drafter == NO_DRAFTER or not (files or self._drafter_model()):
            return ""
        if self._recipe == _ALONE:
            return ""
        options = {"TARGET": self.target_device, "DRAFTER": self.drafter_device}
        devices = [
            device or os.environ.get(f"TANDEM_{name}_DEVICE") or "cpu"
            for name, device in options.items()
        ]
        names = {"cuda:0" if device == "cuda" else device for device in devices}
        return names.pop() if len(names) == 1 else ""

    def settings(self) -> dict[str, dict[str, str]]:
        """Settings by service, without their prefixes.

        Raises:
            Misconfigured: a model does not exist, or a head is broken; or a recipe together with
                drafter "none".
        """
        if self.drafter == NO_DRAFTER and (self.recipe is not None or self.inside):
            option = (
                "--recipe says what drafts" if self.recipe else "--drafts-inside says who drafts"
            )
            raise Misconfigured(f"{option}, and --drafter none that nothing does")
        shared = {"DTYPE": self.dtype, "MAX_LENGTH": self.max_length}
        target = {
            "MODEL": located("target", self.target) if self.target else embedded("target"),
            "DEVICE": self.target_device,
            **shared,
        }
        services = {}
        if self.drafter != NO_DRAFTER:
            model = self._drafter_model()
            try:
                head = method_of(model)
                if head and _FEEDBACK not in os.environ:
                    target["FEEDBACK"] = feedback_of(model, str(target["MODEL"]))
            except StartupError as error:
                raise Misconfigured(f"drafter: {error}") from None
            drafter = {
                "MODEL": model,
                "METHOD": head or None,
                "TARGET": target["MODEL"] if head else None,
                # A forest's second model: the embedded one that was tuned on the drafter's misses.
                "SECOND_MODEL": None if self.drafter else embedded("boosted"),
                "DEVICE": self.drafter_device,
                "DRAFT_SUPPORT": self.draft_support,
                **shared,
                "DTYPE": self.drafter_dtype or self.dtype,
                "RECIPE": self._recipe,
            }
            services["drafter"] = _given(drafter)
            if (
                self._recipe == "masks"
                and self.target is None
                and not _EMBEDDINGS & os.environ.keys()
            ):
                target["EXTRA_EMBEDDINGS"] = str(ROOT / "models" / "pass")
            if self.inside:
                target["DRAFTS"] = self._recipe or head or "model"
                target["DRAFT_DEVICE"] = self.drafter_device
            elif self._shared_device and not _SHARES & os.environ.keys():
                total = _bytes_of(self._shared_device)
                parts = shares_of([str(target["MODEL"]), model], total)
                shares = [f"{part:.3f}" for part in parts]
                target["MEMORY_SHARE"], services["drafter"]["MEMORY_SHARE"] = shares
        return {"target": _given(target), **services}

    @property
    def _recipe(self) -> str | None:
        """The named one; for a target alone the one that needs nothing."""
        alone = self.target is not None and self.drafter is None
        return self.recipe or (_ALONE if alone else None)

    def _drafter_model(self) -> str:
        """The named drafter; else the embedded one, or none for a target of the user's own."""
        if self.drafter == OF_TARGET:
            return OF_TARGET
        if self.drafter is not None:
            return located("drafter", self.drafter)
        own = self.recipe if self.recipe in EMBEDDED_HEADS else "drafter"
        return embedded(own) if self.target is None else ""


def _bytes_of(device: str) -> int | None:
    """Bytes of a GPU, without torch; None of any other device, or where they cannot be read."""
    if not device.startswith("cuda"):
        return None
    number = int(device.partition(":")[2] or 0)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        name = seen.split(",")[number].strip() if seen else str(number)
        asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        found = subprocess.run([*asked, "-i", name], capture_output=True, text=True, timeout=10)
        return int(found.stdout) << 20
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None


def _given(settings: dict[str, str | int | None]) -> dict[str, str]:
    return {name: str(value) for name, value in settings.items() if value is not None}


def embedded(name: str) -> str:
    """Directory of a model of the embedded pair.

    Raises:
        Misconfigured: it is not installed.
    """
    folder: Path = ROOT / "models" / name
    if not (folder / "config.json").is_file():
        raise Misconfigured(
            f"there is no embedded {name} at {folder}: name models with --target and --drafter"
        )
    return str(folder)
