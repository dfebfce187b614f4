"""What earlier starts found out about a model, recorded on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedModel

from tandem.inference.disk_cache import cache_folder, structure_key
from tandem.profile import PassTime

# A start whose try of OpenVINO did not finish may just have been stopped. This many in a row count
# as crashes, and OpenVINO is not tried for a day.
_TRIES = 3
_TRIES_SECONDS = 86_400.0
# What a start measured holds without another measurement where the start before it found the same,
# both with at least this lead over the next way, and for a day: a machine may have been busy.
_CLEAR, _AGREED = 1.15, 2
_CLEAR_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class _Found:
    tries: int = 0
    tried_at: float = 0.0
    best: str = ""
    agreed: int = 0
    measured_at: float = 0.0
    profiles: dict[str, list[PassTime]] = field(default_factory=dict)


class StartRecord:
    """What was found out about the ways to compute a model, in a small file.

    If the file cannot be written, nothing is remembered.

    Args:
        model: with its weights, in its precision.
        threads: that compute.
        question: further options of the choice, on which the result depends.
    """

    def __init__(self, model: PreTrainedModel, threads: int, *question: object) -> None:
        parts = [structure_key(model), str(model.dtype), threads, _processor(), str(question)]
        name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
        try:
            self.path = cache_folder() / f"{name}.json"
        except RuntimeError:  # no home
            self.path = Path(os.devnull)

    @property
    def crashes(self) -> bool:
        """Whether OpenVINO seems to end the process with this model."""
        found = self._read()
        return found.tries >= _TRIES and time.time() - found.tried_at < _TRIES_SECONDS

    @property
    def best(self) -> str:
        """Name of the fastest way; empty if unknown."""
        return self._read().best

    @property
    def clear(self) -> bool:
        """Whether the fastest way has led so clearly, and so often, that nothing need be measured
        now."""
        found = self._read()
        age = time.time() - found.measured_at
        return found.agreed >= _AGREED and 0 <= age < _CLEAR_SECONDS

    def begin(self) -> None:
        """Record that a try of OpenVINO begins."""
        found = self._read()
        self._write(replace(found, tries=found.tries % _TRIES + 1, tried_at=time.time()))

    def end(self) -> None:
        """Record that the try ended without a crash."""
        self._write(replace(self._read(), tries=0))

    def measured(self, best: str, lead: float) -> None:
        """Record the fastest way, and its lead: its speed over the next one's, or 1 where it was
        not always the fastest."""
        found = self._read()
        before = found.agreed if found.best == best else 0
        agreed = before + 1 if lead >= _CLEAR else 0
        self._write(replace(found, tries=0, best=best, agreed=agreed, measured_at=time.time()))

    def profile(self, way: str) -> list[PassTime]:
        """What passes of a way take; empty if unknown."""
        return self._read().profiles.get(way, [])

    def profiled(self, way: str, passes: list[PassTime]) -> None:
        """Record what passes of a way take."""
        found = self._read()
        self._write(replace(found, profiles={**found.profiles, way: passes}))

    def _read(self) -> _Found:
        try:
            found = json.loads(self.path.read_text())
            tries, tried_at = int(found["tries"]), float(found["tried_at"])
            profiles = {
                str(way): [(int(each[0]), int(each[1]), float(each[2])) for each in passes]
                for way, passes in found.get("profiles", {}).items()
            }
            agreed, measured_at = int(found["agreed"]), float(found["measured_at"])
            return _Found(tries, tried_at, str(found["best"]), agreed, measured_at, profiles)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError):
            return _Found()

    def _write(self, found: _Found) -> None:
        if self.path == Path(os.devnull):
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, beside = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(found), file)
            Path(beside).replace(self.path)


def _processor() -> str:
    """The processor's name and features; empty if the system does not tell."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({x for x in lines if x.startswith(("model name", "flags"))}))
    return ""
