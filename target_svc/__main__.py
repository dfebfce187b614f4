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
    """Serve a target until SIGTERM; or compute a part of another machine's."""
    from tandem.rpc.process import run
    from target_svc.settings import TargetSettings

    run("target", TargetSettings, _service, instead=_ranks)


def _service() -> Callable[[TargetSettings], Service]:
    from target_svc.servicer import make_service

    return make_service


def _ranks(settings: TargetSettings) -> bool:
    """Compute a part of another machine's target, if so set; whether that was done."""
    from tandem.settings import read_settings
    from target_svc.settings import VllmSettings

    if settings.engine != "vllm" or not (own := read_settings(VllmSettings)).node:
        return False
    from tandem.inference.vllm.node import serve_ranks
    from target_svc.loading import vllm_options

    serve_ranks(vllm_options(settings, own))
    return True


if __name__ == "__main__":
    main()
