"""python -m drafter_svc"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.inference.threads import spin_less

if TYPE_CHECKING:
    from drafter_svc.settings import DrafterSettings
    from tandem.rpc.server import Service

spin_less()


def main() -> None:
    """Serve a drafter until SIGTERM."""
    from drafter_svc.settings import DrafterSettings
    from tandem.rpc.process import run

    run("drafter", DrafterSettings, _service)


def _service() -> Callable[[DrafterSettings], Service]:
    from drafter_svc.servicer import make_service

    return make_service


if __name__ == "__main__":
    main()
