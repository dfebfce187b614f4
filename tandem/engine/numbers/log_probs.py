"""What is told of tokens and of the likeliest at their places, for many sequences at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.engine.asks import ReadLogProbs
from tandem.engine.numbers.home import copy_to_host
from tandem.shaping.logits import shape
from tandem.speculation.distribution import process
from tandem.speculation.request.log_probs import TokenLogProb


def log_probs_of(asks: Sequence[ReadLogProbs]) -> list[list[TokenLogProb]]:
    """The answers, brought to the host by one copy."""
    read: list[Tensor] = []
    for ask in asks:
        laws = _laws(ask)
        tokens = torch.tensor(ask.token_ids, dtype=torch.long).to(laws.device, non_blocking=True)
        likeliest = laws.topk(min(ask.wanted.top, laws.shape[1]), dim=-1)
        read += [laws.gather(1, tokens[:, None])[:, 0], likeliest.indices, likeliest.values]
    arrays = iter(copy_to_host(read))
    return [
        [
            TokenLogProb(float(value), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
            for value, ids, values in zip(
                next(arrays), next(arrays), next(arrays).astype(np.float64), strict=True
            )
        ]
        for _ in asks
    ]


def _laws(ask: ReadLogProbs) -> Tensor:
    """[R, V] log probabilities at the ask's places."""
    scored = ask.scored
    rows = torch.tensor([scored.first + row for row in ask.rows], dtype=torch.long)
    logits = scored.logits[rows.to(scored.logits.device, non_blocking=True)]
    if ask.sampling is None:
        return logits.float().log_softmax(-1)
    if ask.shaped is not None:
        logits = shape(logits, [(0, ask.shaped)])
    return process(logits, [ask.sampling] * len(ask.rows)).log()
