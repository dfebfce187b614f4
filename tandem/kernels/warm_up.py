"""Kernels of draws and verdicts, compiled before a text waits for them."""

from __future__ import annotations

from itertools import product

import torch

from tandem.kernels import draws, verdicts
from tandem.speculation.request.sampling import Sampling

# Entries of a drafter's rows by default (`DRAFT_SUPPORT`); others are compiled when they come.
_SUPPORT = 512
_WIDTHS = [width for width in verdicts.WIDTHS if width <= _SUPPORT]


def warm_up(device: torch.device, vocab_size: int, dtype: str) -> None:
    """Draw from a row, and decide a draft by each rule, for nothing; on a CPU there is nothing to
    compile. Takes seconds the first time on a machine: Triton keeps what it has compiled.

    Args:
        device: that computes.
        vocab_size: columns of the logits.
        dtype: of the logits, such as "bfloat16"; those of shaped texts are float32.
    """
    if device.type == "cpu":
        return
    for kind in dict.fromkeys((getattr(torch, dtype), torch.float32)):
        logits = torch.zeros(1, vocab_size, dtype=kind, device=device)
        asked = torch.from_numpy(draws.asked_of([0], vocab_size, [Sampling()], 1)).to(device)
        none = torch.empty(1, 0, dtype=torch.int64, device=device)
        draws.draw(logits, asked, none, 1.0, _SUPPORT, 1)
        places = asked[:, : draws.DIGITS].contiguous()
        laws = draws.laws(logits, places)
        texts = torch.zeros(1, verdicts.UNIFORMS + 1, dtype=torch.float64, device=device)
        for rule, width in product(("block", "token"), _WIDTHS):
            rows = torch.empty(0, 1 + 2 * width, dtype=torch.int64, device=device)
            verdicts.decide(logits, laws, places, texts, rows, rule)
