"""A work-around for a defect of vLLM's CPU builds (vllm#55005).

They repeat a text's sampling parameters for its drafted rows in a copy, and leave the tensor that
the sampler reads as it was allocated: drafted rows have arbitrary temperatures.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expand(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Each text's number for each of its rows.

    Args:
        x: [B].
        cu_num_tokens: [B], the end of each text's rows.
        num_tokens: R, rows in all.
        replace_from: a number.
        replace_to: that stands for it.

    Returns:
        [R], as `x`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    own = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return own.repeat_interleave(counts, output_size=num_tokens)


def mend() -> bool:
    """Replace vLLM's function on a CPU where it gives wrong numbers; whether it did."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        return False
    ends = torch.tensor([1, 3, 6], dtype=torch.int32)
    # Memory as it was allocated may hold what is wanted once, but not each time.
    for factor in (1.0, 3.0, 7.0):
        x = factor * torch.tensor([0.5, 0.0, 0.25])
        found = rejection_sampler.expand_batch_to_tokens(x, ends, 6, 0, 1)
        if not torch.equal(found, expand(x, ends, 6, 0, 1)):
            rejection_sampler.expand_batch_to_tokens = expand
            return True
    return False
