"""The target, on a simulated device."""

from __future__ import annotations

from benchmarks.simulated.device import simulate
from target_svc.__main__ import main

if __name__ == "__main__":
    simulate("target")
    main()
