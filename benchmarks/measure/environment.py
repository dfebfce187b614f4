"""Where a figure was measured, and where it is kept."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from argparse import ArgumentTypeError
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def describe() -> dict[str, str]:
    """Machine, versions, commit, and how memory is allocated."""
    packages = ("torch", "transformers", "grpcio", "protobuf", "numpy")
    return {
        "machine": _processor(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "commit": _commit(),
        "memory": os.environ.get("GLIBC_TUNABLES", ""),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        **versions(*packages),
    }


def versions(*packages: str) -> dict[str, str]:
    """Of the packages that are installed."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def result_file(text: str) -> Path:
    """Of an option: a file that `keep` can write after a long run.

    Raises:
        ArgumentTypeError: it is a folder.
    """
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a folder; name a file in it, such as result.json")
    return path


def keep(path: Path, **found: Any) -> None:
    """Write what was found as JSON, with the environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": describe(), **found}, indent=2) + "\n")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        facts: dict[str, str] = {}
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
        flags = facts.get("flags", "").split()
        units = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
        model = f"family {facts.get('cpu family')} model {facts.get('model')}"
        return f"{facts.get('model name', platform.machine())} ({model}; {' '.join(units)})"
    return platform.processor() or platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return "unknown"
    return result.stdout.strip() or "unknown"


def target_dtype(device: str = "cpu") -> str:
    """The dtype for a large target: on this machine's CPU bfloat16 only with hardware support."""
    return "bfloat16" if device != "cpu" or "bf16" in _processor() else "float32"
