"""Tokens drawn from rows that a target told, without a pass."""

from __future__ import annotations

import numpy as np
import torch

from tandem.engine.asks import DrawFrom
from tandem.speculation.categorical import Categorical
from tandem.speculation.distribution import process
from tandem.speculation.draft import Draft
from tandem.speculation.randomness import foresee


def draw_from(ask: DrawFrom) -> Draft:
    """A draw from each row: process, truncate, round, draw, as from a model's logits.

    A row all of whose tokens are beyond the vocabulary ends the draft before it.
    """
    rows = [row.ids < ask.vocab_size for row in ask.rows]
    count = next((place for place, kept in enumerate(rows) if not kept.any()), len(rows))
    if not count:
        return Draft.certain(())
    width = max(int(kept.sum()) for kept in rows[:count])
    ids, weights = np.zeros((count, width), np.int64), np.zeros((count, width), np.int64)
    for place, (row, kept) in enumerate(zip(ask.rows, rows, strict=False)):
        if place < count:
            size = int(kept.sum())
            ids[place, :size], weights[place, :size] = row.ids[kept], row.weights[kept]
    logits = torch.from_numpy(weights).double().log().float()  # of padding: -inf
    if ask.sampling.greedy:
        drawn = Categorical.argmax(logits)
        places = drawn.ids[:, 0]
    else:
        if not ask.numbers.covers(ask.round, count):
            foresee([(ask.numbers, ask.round, count)])
        probs = process(logits, [ask.sampling])
        drawn = Categorical.quantize(probs, ask.truncation.mass, ask.truncation.support)
        places = drawn.draw(torch.from_numpy(ask.numbers.take(ask.round, count)))
    there = torch.from_numpy(ids)
    tokens = there.gather(1, places[:, None])[:, 0]
    sent = there.gather(1, drawn.ids)
    (draft,) = Draft.batch(tokens.numpy(), sent.numpy(), drawn.weights.numpy(), [count])
    assert draft is not None  # no weight of a row is 0
    return draft
