"""Wait until a service is SERVING, like a Kubernetes probe.

python -m tests.support.processes.probe ADDRESS SERVICE SECONDS
"""

from __future__ import annotations

import sys
import time

import grpc

from tests.support.processes.services import is_serving

PAUSE_SECONDS = 0.2


def main() -> int:
    """Exit code: 0, or 1 if it did not serve in time."""
    address, service, seconds = sys.argv[1:]
    deadline = time.monotonic() + float(seconds)
    while time.monotonic() < deadline:
        try:
            if is_serving(address, service):
                return 0
        except grpc.RpcError:
            pass
        time.sleep(PAUSE_SECONDS)
    return 1


if __name__ == "__main__":
    sys.exit(main())
