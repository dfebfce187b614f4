"""CPU features for bfloat16, which some machines lack."""

from __future__ import annotations

import pytest
import torch

needs_units = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(),
    reason="this CPU has no bfloat16 units: run on one with avx512_bf16 in /proc/cpuinfo",
)


def can_pack() -> bool:
    """Whether oneDNN packs weights in bfloat16 on this CPU."""
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported
