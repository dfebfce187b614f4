"""What a distillation is asked to do; without torch."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from tandem.errors import StartupError
from tandem.whole_files import writing

Divergence = Literal["forward-kl", "reverse-kl", "jsd", "tvd", "cross-entropy"]
Data = Literal["corpus", "target", "on-policy", "mixed"]

# Of a plan, what may change when a run goes on.
_MAY_CHANGE = {"steps", "minutes", "rate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """A distillation: which pair, on which texts, for how long.

    Attributes:
        target: directory of the target's checkpoint, or HOST:PORT of an orchestrator that serves
            it.
        drafter: directory of the checkpoint to begin with; empty for a fresh one.
        prompts: file of texts, one JSON object a line (see `read_records`).
        held_out: another such file, to measure on; empty holds out some of `prompts`.
        divergence: of the target's rows and the drafter's, a `Divergence`.
        data: whose texts the rows are of, a `Data`.
        steps: of the optimiser; 0 goes by `minutes`.
        minutes: of training, where `steps` is 0.
        rows: texts a step.
        length: tokens of a text.
        rate: the largest learning rate; it falls to zero.
        measure_every: steps between two measurements on what is held out.
        seed: of batches and samples.
        layers: of a fresh drafter.
        width: of a fresh drafter.
    """

    target: str
    drafter: str
    prompts: str
    held_out: str = ""
    divergence: Divergence = "tvd"
    data: Data = "target"
    steps: int = 0
    minutes: float = 60.0
    rows: int = 16
    length: int = 512
    rate: float = 1e-3
    measure_every: int = 100
    seed: int = 0
    layers: int = 0
    width: int = 0

    def check(self) -> None:
        """See that its numbers make sense.

        Raises:
            StartupError: one does not; says which.
        """
        for name, kinds in (("divergence", Divergence), ("data", Data)):
            if getattr(self, name) not in get_args(kinds):
                known = ", ".join(get_args(kinds))
                raise StartupError(f"{name}: {getattr(self, name)!r} is none of {known}")
        if self.divergence == "cross-entropy" and self.data in ("on-policy", "mixed"):
            raise StartupError(
                "cross-entropy learns the tokens of texts, and the drafter's own teach it nothing;"
                " take data corpus or target"
            )
        if bool(self.drafter) == bool(self.layers or self.width):
            raise StartupError(
                "give the drafter's directory, or layers and width of a fresh one, not both"
            )
        if not self.drafter and not (self.layers > 0 and self.width > 0):
            raise StartupError("a fresh drafter needs layers and width")
        if self.width % 32:
            raise StartupError("width must be a multiple of 32")
        for name, least in (("rows", 1), ("length", 8), ("measure_every", 1), ("steps", 0)):
            if getattr(self, name) < least:
                raise StartupError(f"{name} must be at least {least}")
        for name in ("rate", "minutes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise StartupError(f"{name} must be positive")

    @property
    def is_served(self) -> bool:
        """Whether the target is a service."""
        return ":" in self.target and not Path(self.target).exists()


def keep_plan(plan: Distillation, inputs: dict[str, str], path: Path) -> None:
    """Write the plan of a new run, or see that a run goes on as it began.

    Args:
        plan: of this call.
        inputs: what identifies the files that it names, by name.
        path: of the file.

    Raises:
        StartupError: the run at this place has another plan; says where they differ.
    """
    if path.exists():
        try:
            began = json.loads(path.read_text())
        except ValueError:
            raise StartupError(f"{path} cannot be read; remove {path.parent} to begin") from None
        now = asdict(plan) | inputs
        changed = [
            f"{name} was {began.get(name)!r} and is {value!r}"
            for name, value in now.items()
            if name not in _MAY_CHANGE and began.get(name) != value
        ]
        if changed:
            raise StartupError(
                f"the run in {path.parent} has another plan: {'; '.join(changed)}. Give what it"
                " began with, or another output, or remove that folder"
            )
    with writing(path) as fresh:
        fresh.write_text(json.dumps(asdict(plan) | inputs, indent=2) + "\n")


def inputs_of(plan: Distillation) -> dict[str, str]:
    """What identifies the files of a plan: hashes of texts, names and sizes of a model's files.

    Raises:
        StartupError: a file of texts cannot be read.
    """
    found = {}
    for name in ("prompts", "held_out"):
        path = getattr(plan, name)
        if path:
            try:
                found[f"{name}_sha256"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            except OSError as error:
                raise StartupError(f"cannot read {path}: {error}") from None
    for name in ("target", "drafter"):
        folder = Path(getattr(plan, name) or "nothing")
        files = sorted(path for path in folder.glob("*") if path.is_file())
        found[f"{name}_files"] = ", ".join(f"{each.name} {each.stat().st_size}" for each in files)
    return found
