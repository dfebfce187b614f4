"""The pair that all engines run: the embedded drafter and the expanded target, converted too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

from benchmarks.expand import Shape, expand
from benchmarks.peers.installation import CACHE, OPENVINO, run_logged
from tandem.tools.local.pair import embedded

_CONVERSION_SECONDS = 600.0


def checkpoints(shape: Shape, say: Callable[[str], None]) -> dict[str, str]:
    """Folders of target and drafter; the target is expanded once for a shape."""
    target = CACHE / "models" / ("target-" + "-".join(map(str, astuple(shape))))
    if not target.is_dir():
        say("expanding the target")
        unfinished = target.with_name(f"{target.name}.new")
        shutil.rmtree(unfinished, ignore_errors=True)
        expand(Path(embedded("target")), shape, unfinished)
        unfinished.rename(target)
    return {"target": str(target), "drafter": embedded("drafter")}


def converted(folders: dict[str, str], say: Callable[[str], None]) -> dict[str, str]:
    """The same for OpenVINO GenAI, weights in float16; needs its environment.

    Raises:
        EngineFailed: a checkpoint cannot be converted.
    """
    found: dict[str, str] = {}
    for role, source in folders.items():
        out = OPENVINO.folder / Path(source).name
        found[role] = str(out)
        if out.is_dir():
            continue
        say(f"converting the {role} for OpenVINO")
        unfinished = out.with_name(f"{out.name}.new")
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [OPENVINO.program("optimum-cli"), "export", "openvino", "--model", source]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp16"]
        log = OPENVINO.folder / "convert.log"
        run_logged([*command, str(unfinished)], log, _CONVERSION_SECONDS)
        unfinished.rename(out)
    return found
