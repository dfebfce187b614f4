"""The law of texts, token by token after what each has before it: of any length, by no
enumeration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor
from transformers import AutoModelForCausalLM

# Fewer expected tokens of a cell say too little to be compared.
_FEWEST = 5.0


def softmax(logits: Tensor) -> Tensor:
    """At temperature 1."""
    return logits.softmax(-1)


def rows_of(
    model: Path,
    prompt: Sequence[int],
    texts: Sequence[Sequence[int]],
    process: Callable[[Tensor], Tensor] = softmax,
) -> list[npt.NDArray[np.float64]]:
    """The distribution of each token of each text, [tokens, V] a text, in float64.

    Args:
        model: folder of the checkpoint.
        prompt: before each text.
        texts: of token ids.
        process: makes distributions from logits [..., V].
    """
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    longest = max(map(len, texts))
    padded = torch.tensor([[*prompt, *text, *[0] * (longest - len(text))] for text in texts])
    with torch.inference_mode():
        parts = [loaded(part).logits[:, len(prompt) - 1 : -1] for part in torch.split(padded, 512)]
    rows = process(torch.cat(parts)).numpy()
    return [row[: len(text)] for row, text in zip(rows, texts, strict=True)]


def p_value(
    texts: Sequence[Sequence[int]], rows: Sequence[npt.NDArray[np.float64]], last: int
) -> float:
    """How likely it is that tokens which follow `rows` are further from them than these.

    Tokens are counted by the one before them. In each such group the counts less what the rows
    expect are a sum of martingale differences: their quadratic form by the covariance that the rows
    give is a chi-square of as many degrees of freedom as the covariance has ranks.

    Args:
        texts: of token ids.
        rows: of each text, [tokens, V].
        last: token of the prompt, before each text.
    """
    before = np.concatenate([[last, *text[:-1]] for text in texts]).astype(int)
    tokens, p = np.concatenate([list(text) for text in texts]), np.concatenate(rows)
    assert (p[np.arange(len(p)), tokens] > 0).all(), "a token of probability 0"
    statistic, freedom = 0.0, 0
    for group in np.unique(before):
        own = p[before == group]
        counts = np.bincount(tokens[before == group], minlength=p.shape[1])
        expected = own.sum(0)
        cells = np.flatnonzero(expected >= _FEWEST)
        if len(cells) < 2:
            continue
        own = own[:, cells]
        off = counts[cells] - expected[cells]
        covariance = np.diag(own.sum(0)) - own.T @ own
        inverse = np.linalg.pinv(covariance, rcond=1e-8, hermitian=True)
        statistic += float(off @ inverse @ off)
        freedom += int(np.linalg.matrix_rank(covariance, tol=1e-8 * np.abs(covariance).max()))
    return float(stats.chi2.sf(statistic, freedom))
