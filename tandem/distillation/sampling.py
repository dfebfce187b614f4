"""Texts that a model continues, many at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def continue_rows(
    model: Any,
    tokens: Tensor,
    known: Tensor,
    vocabulary: int,
    generator: torch.Generator | None,
    told: Callable[[int, Tensor], None] = lambda place, logits: None,
) -> Tensor:
    """Fill rows behind what is known of them, one position of all rows a pass.

    Args:
        model: of transformers.
        tokens: [rows, time] of int64.
        known: [rows] how many of each row's first tokens are given; at least one.
        vocabulary: only ids below it are drawn.
        generator: draws at temperature 1; None takes the likeliest token.
        told: called with the logits [rows, vocabulary] of each place that is filled.

    Returns:
        [rows, time].
    """
    filled = tokens.clone()
    first, time = int(known.min()), tokens.shape[1]
    cache, seen = None, filled[:, :first]
    for place in range(first, time):
        found = model(input_ids=seen, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = found.past_key_values
        logits = found.logits[:, -1, :vocabulary].float()
        told(place, logits)
        if generator is None:
            drawn = logits.argmax(-1)
        else:
            row = logits.softmax(-1).to(generator.device)
            drawn = torch.multinomial(row, 1, generator=generator)[:, 0].to(tokens.device)
        filled[:, place] = torch.where(place < known, filled[:, place], drawn)
        seen = filled[:, place : place + 1]
    return filled
