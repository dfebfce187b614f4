"""python tethered.py MODULE: run a module for as long as our parent lives.

The parent holds the other end of our standard input and never writes. However the parent ends, even
by SIGKILL, the system closes that end, and we send the module SIGTERM in the parent's place.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def main() -> None:
    """Run the module that the command line names, as `python -m` would."""
    _, module = sys.argv
    threading.Thread(target=_watch, name="tether", daemon=True).start()
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _watch() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
