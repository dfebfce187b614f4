"""A process that notes what the import of OpenVINO does, and gives a pass up as a signal comes.

Another thread gives it up, as it is when what gives it up runs there.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import sys
import threading
import time

from tests.support.decoders import decoder_over
from tests.support.models.architectures import LLAMA, build

WATCHED = ("os.fork", "socket.connect", "socket.getaddrinfo", "subprocess.Popen")


def main() -> None:
    faulthandler.enable()
    asked: list[str] = []
    sys.addaudithook(lambda event, _: asked.append(event) if event in WATCHED else None)
    assert "openvino" not in sys.modules
    importlib.import_module("tandem.inference.openvino.paged_pass")
    time.sleep(0.5)  # a thread of it might ask later
    sys.stdout.write(f"{', '.join(asked) or 'nothing'}\n")
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    passes = [decoder_over(build(LLAMA), "tiny", cache_tokens=64, engine="openvino")]

    def give_up() -> None:
        passes.clear()
        gc.collect()

    thread = threading.Thread(target=give_up)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
