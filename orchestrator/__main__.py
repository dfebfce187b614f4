"""python -m orchestrator"""

from __future__ import annotations

from orchestrator.front.service import make_service
from orchestrator.settings import OrchestratorSettings
from tandem.rpc.process import run


def main() -> None:
    """Serve an orchestrator until SIGTERM."""
    run("orchestrator", OrchestratorSettings, lambda: make_service)


if __name__ == "__main__":
    main()
