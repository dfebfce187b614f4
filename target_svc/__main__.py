"""python -m target_svc"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.inference.threads import spin_less

if TYPE_CHECKING:
    from tandem.rpc.server import Service
    from target_svc.settings import TargetSettings

spin_less()


def main() -> None:
    """Serve a target until SIGTERM."""
    from tandem.rpc.process import run
    from target_svc.settings import TargetSettings

    run("target", TargetSettings, _service)


def _service() -> Callable[[TargetSettings], Service]:
    from target_svc.servicer import make_service

    return make_service


if __name__ == "__main__":
    main()
