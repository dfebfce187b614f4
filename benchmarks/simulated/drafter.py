"""The drafter, on a simulated device."""

from __future__ import annotations

from benchmarks.simulated.device import simulate
from drafter_svc.__main__ import main

if __name__ == "__main__":
    simulate("drafter")
    main()
