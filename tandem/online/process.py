"""The trainer's process, as its drafter sees it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from tandem.online.order import Order

# Last lines of its standard error that are kept.
_LINES = 5


class TrainerProcess:
    """A trainer at work. It ends when this process does.

    Args:
        order: what it does.
        said: is called in a thread with the process and what it says, see `tandem.online.__main__`.
        ended: is called in a thread at its end, with a sentence.
    """

    def __init__(
        self,
        order: Order,
        said: Callable[[TrainerProcess, dict[str, Any]], None],
        ended: Callable[[TrainerProcess, str], None],
    ) -> None:
        self._said, self._ended = said, ended
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tandem.online", json.dumps(asdict(order))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # an interrupt from a terminal is for the drafter
        )
        self._errors: deque[str] = deque(maxlen=_LINES)
        self._listening = threading.Thread(target=self._listen, name="trainer", daemon=True)
        self._reading = threading.Thread(target=self._read_errors, name="errors", daemon=True)
        self._reading.start()
        self._listening.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def end(self) -> None:
        """End it; all that it writes is whole at any moment."""
        with suppress(OSError):
            self._process.kill()
        self._listening.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict):
                    self._said(self, said)
        self._reading.join()
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        why = f": {self._errors[-1]}" if self._errors else ""
        self._ended(self, f"the trainer ended with {code}{why}")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if text := line.decode(errors="replace").strip():
                self._errors.append(text)
