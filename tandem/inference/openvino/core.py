"""The process's one OpenVINO core."""

from __future__ import annotations

from functools import cache

import openvino as ov


@cache
def core() -> ov.Core:
    """OpenVINO's runtime, made once and kept.

    Its CPU plugin gives the thread that makes it a stack for signal handlers, and unmaps that
    stack with the last core, in whatever thread lets it go: the next signal would end the process
    with a segmentation fault (`SigAltStackSetup` in OpenVINO 2022.2 to 2026.4).
    """
    return ov.Core()
