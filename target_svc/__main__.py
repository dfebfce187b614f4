"""python -m target_svc"""

from __future__ import annotations

from tandem.inference.threads import spin_less

spin_less()


def main() -> None:
    """Serve a target until SIGTERM."""
    from tandem.rpc.server import run
    from target_svc.servicer import make_service
    from target_svc.settings import TargetSettings

    run("target", TargetSettings, make_service)


if __name__ == "__main__":
    main()
