"""From logits to the distribution that a token is drawn from, and the draw itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tandem.speculation.categorical import MAX_WEIGHT, Categorical
from tandem.speculation.sampling import Sampling

# Top-p looks at this many of the most likely tokens first: sorting five rows of a
# 128,256-token vocabulary takes 25 times as long as their top 256.
_NUCLEUS_FIRST_LOOK = 256
# A smaller temperature is 0 in float32, and 0 / 0 is no score.
_COLDEST = 1e-30


def process(logits: Tensor, sampling: Sampling) -> Tensor:
    """The processed distribution: temperature, then top-k, then top-p, then min-p.

    Args:
        logits: [N, V], any floating dtype.
        sampling: the request's parameters; temperature 0 gives the one-hot argmax.

    Returns:
        [N, V] probabilities, float32 (float64 for float64 logits).
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if sampling.greedy:
        best, place = logits.max(-1, keepdim=True)
        # A logit that is no number must not become a certainty: it makes the row NaN.
        return torch.zeros_like(logits).scatter_(-1, place, 1.0) + 0.0 * best
    temperature = max(sampling.temperature, _COLDEST)
    scores = (logits - logits.amax(-1, keepdim=True)) / temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if sampling.top_p < 1:
        scores = _keep_nucleus(scores, sampling.top_p)
    probs = scores.softmax(-1)
    if sampling.min_p > 0:
        dropped = probs < sampling.min_p * probs.amax(-1, keepdim=True)
        probs = scores.masked_fill(dropped, -torch.inf).softmax(-1)
    return probs


def _keep_nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Scores [N, V] with all but the smallest set of at least `top_p` mass at -inf."""
    normaliser = scores.logsumexp(-1, keepdim=True)
    first_look = min(_NUCLEUS_FIRST_LOOK, scores.shape[-1])
    values, indices = scores.topk(first_look, dim=-1)
    before = _mass_before(values, normaliser)
    if first_look < scores.shape[-1] and bool((before[:, -1] < top_p).any()):
        values, indices = scores.sort(dim=-1, descending=True)
        before = _mass_before(values, normaliser)
    kept = values.masked_fill(before >= top_p, -torch.inf)
    return torch.full_like(scores, -torch.inf).scatter_(-1, indices, kept)


def _mass_before(scores: Tensor, normaliser: Tensor) -> Tensor:
    """The mass of all more likely tokens, for scores in descending order.

    That of the first is below any share, so that no rounding drops all tokens.
    """
    probs = (scores - normaliser).exp()
    before = probs.cumsum(-1) - probs
    before[:, 0] = -1.0
    return before


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token from each row of unnormalised weights by inverse CDF.

    Never lands on a weight of 0: not at u = 0, and not where rounding leaves u times the
    total at or past the last partial sum. Without a host synchronisation.

    Args:
        weights: [B, V], >= 0, each row with a positive sum.
        uniforms: [B] float64 in [0, 1).

    Returns:
        [B] int64 token ids.
    """
    sums = weights.double().cumsum(-1)
    positive = weights > 0
    indices = torch.arange(weights.shape[-1], device=weights.device)
    beyond = positive & (sums > uniforms.double()[:, None] * sums[:, -1:])
    first = torch.where(beyond, indices, weights.shape[-1]).amin(-1)
    last = torch.where(positive, indices, 0).amax(-1)
    return torch.minimum(first, last)


def quantize(probs: Tensor, mass: float, support: int) -> Categorical:
    """Truncate a distribution and round it to integer weights.

    Keeps the smallest set of most likely tokens that covers `mass`, at most `support` of
    them, scales the largest probability to 65535 and drops what rounds to 0.

    Args:
        probs: [V] float32 probabilities.
        mass: the share to cover, in (0, 1]; not applied where support is 0.
        support: the most tokens to keep; 0 keeps the full vocabulary.
    """
    if support == 0:
        values, ids = probs, torch.arange(probs.shape[0], device=probs.device)
    else:
        values, ids = probs.topk(min(support, probs.shape[0]))
        covered_before = values.cumsum(0) - values
        covered_before[0] = -1.0  # the likeliest token stays, whatever the rounding
        keep = covered_before < mass
        values, ids = values[keep], ids[keep]
    weights = (values / values.amax() * MAX_WEIGHT).round().to(torch.int32)
    keep = weights > 0
    return Categorical(
        ids[keep].cpu().numpy().astype(np.uint32), weights[keep].cpu().numpy().astype(np.uint16)
    )
