"""python -m drafter_svc"""

from __future__ import annotations

from tandem.inference.threads import spin_less

spin_less()


def main() -> None:
    """Serve a drafter until SIGTERM."""
    from drafter_svc.servicer import make_service
    from drafter_svc.settings import DrafterSettings
    from tandem.rpc.server import run

    run("drafter", DrafterSettings, make_service)


if __name__ == "__main__":
    main()
