"""What a drafter has learnt, on disk: readable whenever the process that wrote it was killed.

state.json              which weights are served, and whether learning is frozen
weights/00000007.safetensors
replay/                 texts, see `Replay`
offers/                 weights that the trainer wrote, until they are taken or turned down
home.safetensors        texts that the drafter wrote about what it is for; of a head those that its
                        target wrote, or those of ONLINE_HOME
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tandem.errors import StartupError
from tandem.whole_files import alone, writing


@dataclass(frozen=True, slots=True)
class Learnt:
    """What was learnt.

    Attributes:
        of: weights fingerprint of the checkpoint; empty before it is known.
        version: of the weights that are served; 0 for those of the checkpoint.
        weights: name of their file; empty for those of the checkpoint, also after a reset.
        frozen: whether learning is stopped.
        updates: how often new weights were taken.
    """

    of: str = ""
    version: int = 0
    weights: str = ""
    frozen: bool = False
    updates: int = 0


class StateFolder:
    """The folder of a drafter's state. One process has it at a time.

    Attributes:
        learnt: as it was last written or read.
        saves: whether anything can be written.

    Args:
        path: of the folder; is made where it is missing.

    Raises:
        StartupError: another process has it, or its state cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saves = _writable(path)
        self._lock: AbstractContextManager[None] | None = None
        if self.saves:
            self._lock = alone(path)
            self._lock.__enter__()
        try:
            self.learnt = self._read()
            if self.saves:
                self._tidy()
        except BaseException:
            self.close()
            raise

    @property
    def weights(self) -> str:
        """Path of the weights that are served; empty for the checkpoint's."""
        return str(self.path / "weights" / self.learnt.weights) if self.learnt.weights else ""

    def write(self, learnt: Learnt) -> None:
        """Replace the state in one move.

        Raises:
            OSError: there is no room; the state before stays.
        """
        if self.saves:
            with writing(self.path / "state.json") as fresh:
                fresh.write_text(json.dumps(asdict(learnt), indent=1) + "\n")
        self.learnt = learnt

    def take(self, offer: Path) -> Learnt:
        """Make offered weights those that are served: a file of their own first, then the state
        that names it. At any moment the state names a file that is whole.

        Raises:
            OSError: as `write`.
        """
        version = self.learnt.version + 1
        name = f"{version:08}.safetensors"
        (self.path / "weights").mkdir(exist_ok=True)
        offer.replace(self.path / "weights" / name)
        self.write(
            replace(self.learnt, version=version, weights=name, updates=self.learnt.updates + 1)
        )
        self._forget_others()
        return self.learnt

    def know(self, of: str) -> None:
        """Note the weights fingerprint of the checkpoint, where it is not known yet.

        Raises:
            StartupError: it cannot be written.
        """
        if not self.learnt.of:
            try:
                self.write(replace(self.learnt, of=of))
            except OSError as error:
                raise StartupError(f"ONLINE_FOLDER: {error}") from None

    def forget_texts(self) -> None:
        """Remove texts and what was learnt from them since the newest version.

        Raises:
            OSError: there is no right to.
        """
        for name in ("replay", "offers"):
            with suppress(FileNotFoundError):
                shutil.rmtree(self.path / name)
        (self.path / "home.safetensors").unlink(missing_ok=True)

    def begin_again(self, *, anew: bool = False) -> Learnt:
        """Serve the checkpoint's weights as a further version, and forget the texts.

        Args:
            anew: the checkpoint is another one.

        Raises:
            OSError: as `write`.
        """
        # First: a process that is killed here has forgotten too much, and not too little.
        self.forget_texts()
        learnt = replace(self.learnt, version=self.learnt.version + 1, weights="")
        self.write(replace(learnt, of="", updates=0) if anew else learnt)
        self._forget_others()
        return self.learnt

    def close(self) -> None:
        """Let another process have it."""
        if self._lock is not None:
            self._lock.__exit__(None, None, None)
            self._lock = None

    def _read(self) -> Learnt:
        path = self.path / "state.json"
        try:
            found = Learnt(**json.loads(path.read_text()))
        except FileNotFoundError:
            return Learnt()
        except (OSError, ValueError, TypeError) as error:
            raise StartupError(
                f"the state of ONLINE_FOLDER cannot be read ({path}: {error}); restore it, or"
                " remove the folder to begin anew"
            ) from None
        if found.weights and not (self.path / "weights" / found.weights).is_file():
            raise StartupError(
                f"the state of ONLINE_FOLDER names weights that are gone ({found.weights}); restore"
                f" them, or remove {self.path} to begin anew"
            )
        return found

    def _forget_others(self) -> None:
        for path in (self.path / "weights").glob("*"):
            if path.name != self.learnt.weights:
                with suppress(OSError):  # the next start looks again
                    path.unlink()

    def _tidy(self) -> None:
        """Remove what a process left that was killed: files that are not whole, offers, weights
        that no state names."""
        for path in (*self.path.glob("*.new"), *self.path.glob("*/*.new")):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.path / "offers", ignore_errors=True)
        self._forget_others()


def _writable(path: Path) -> bool:
    """Whether files can be made in a folder, which is made where it is missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True
