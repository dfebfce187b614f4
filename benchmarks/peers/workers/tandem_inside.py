"""Tandem's target with drafts of its own, behind an orchestrator: two services."""

from __future__ import annotations

from benchmarks.peers.protocol import serve
from benchmarks.peers.workers.tandem_services import TandemServices

if __name__ == "__main__":
    serve(TandemServices(inside=True))
