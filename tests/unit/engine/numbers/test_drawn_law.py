"""Tokens are drawn from the very rows that are sent with them: only so is verification exact.

A published fault of other engines: tokens are drawn from bfloat16 rows, and float32 rows are sent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tandem.engine.asks import Draw, Truncation
from tandem.engine.numbers.draws import draw
from tandem.inference.feed import Feed
from tandem.speculation.request.sampling import Sampling

# Bfloat16 rounds each of these by 1e-3 and more.
LAW = np.array([0.5019, 0.2012, 0.1504, 0.1004, 0.0461])
DRAWS = 1 << 14


class EveryNumber:
    """The numbers of a text: each rank's lie evenly in all that there are, in an order of its own,
    so that shares of drawn tokens are the law, but for one in `DRAWS`."""

    def __init__(self, text: int) -> None:
        self._text = text

    def covers(self, round_: int, count: int) -> bool:
        return True

    def take(self, round_: int, count: int) -> npt.NDArray[np.int64]:
        places = [(self._text * step) % DRAWS for step in (1, 4099, 8209)[:count]]
        high = [((2 * place + 1) << 31) // DRAWS for place in places]
        return np.array([[0, each] for each in high], np.int64)


def ask(text: int, ranks: int, support: int) -> Draw:
    return Draw(
        scorer=None,  # type: ignore[arg-type]
        feed=Feed(None, [0], 1),  # type: ignore[arg-type]
        sampling=Sampling(),
        truncation=Truncation(1.0, support),
        vocab_size=len(LAW),
        numbers=EveryNumber(text),  # type: ignore[arg-type]
        round=1,
        node=0,
        nodes=ranks,
        counts=[ranks],
    )


@pytest.mark.parametrize("support", [0, 5])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_follow_the_rows_that_are_sent(ranks: int, support: int) -> None:
    asks = [ask(text, ranks, support) for text in range(DRAWS)]
    logits = torch.tensor(LAW, dtype=torch.float32).log().expand(DRAWS, -1).clone()
    drawn = draw(asks, logits, range(DRAWS))
    row = drawn[0][0].draws.rows
    sent = np.zeros(len(LAW))
    sent[row.ids[0]] = row.weights[0] / row.weights[0].sum()
    assert sent == pytest.approx(LAW / LAW.sum(), abs=1e-5)  # as they are rounded
    tokens = drawn[0][0].draws.tokens.numpy().reshape(DRAWS, ranks)
    for rank in range(ranks):
        shares = np.bincount(tokens[:, rank], minlength=len(LAW)) / DRAWS
        assert shares == pytest.approx(sent, abs=2 / DRAWS), rank
    if ranks == 2:  # and each rank by numbers of its own
        pairs = np.bincount(tokens @ [len(LAW), 1], minlength=len(LAW) ** 2) / DRAWS
        assert pairs == pytest.approx(np.outer(sent, sent).flatten(), abs=0.02)
