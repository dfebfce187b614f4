"""Tandem's drafters for `vllm serve`; docs/vllm-plugin.md says how.

vLLM finds these classes by their names here, in each of its processes. Each is imported when it is
asked for: their modules import vLLM's own of another part.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem_vllm.proposer import Proposer
    from tandem_vllm.scheduler import DraftingScheduler
    from tandem_vllm.worker import DraftingWorker

__all__ = ["DraftingScheduler", "DraftingWorker", "Proposer"]

_MODULES = {"Proposer": "proposer", "DraftingWorker": "worker", "DraftingScheduler": "scheduler"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tandem_vllm' has no attribute {name!r}")
    return getattr(import_module(f"tandem_vllm.{_MODULES[name]}"), name)
