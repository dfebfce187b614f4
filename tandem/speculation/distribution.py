"""From logits to the distribution that a token is drawn from, and the draw itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.speculation.sampling import Sampling

# Top-p looks at this many of the most likely tokens first: sorting five rows of a
# 128,256-token vocabulary takes 25 times as long as their top 256.
_NUCLEUS_FIRST_LOOK = 256
# A smaller temperature is 0 in float32 and a larger one infinite; 0 / 0 is no score.
_COLDEST, _HOTTEST = 1e-30, 1e30


def process(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """The processed distributions: temperature, then top-k, then top-p, then min-p.

    A row depends on its own logits and parameters alone, whatever shares its batch.

    Args:
        logits: [N, V], any floating dtype.
        samplings: one a row, or one for all; temperature 0 gives the one-hot argmax.

    Returns:
        [N, V] probabilities, float32 (float64 for float64 logits).
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    if all(sampling.greedy for sampling in samplings):
        return _one_hot(logits)
    temperature = _column([min(max(s.temperature, _COLDEST), _HOTTEST) for s in samplings], logits)
    scores = (logits - logits.amax(-1, keepdim=True)) / temperature
    if any(0 < s.top_k < scores.shape[-1] for s in samplings):
        scores = _keep_top_k(scores, samplings)
    if any(s.top_p < 1 for s in samplings):
        scores = _keep_nucleus(scores, _column([s.top_p for s in samplings], scores))
    probs = scores.softmax(-1)
    if any(s.min_p > 0 for s in samplings):
        dropped = probs < _column([s.min_p for s in samplings], probs) * probs.amax(-1, True)
        probs = scores.masked_fill(dropped, -torch.inf).softmax(-1)
    if any(s.greedy for s in samplings):
        greedy = torch.tensor([[s.greedy] for s in samplings], device=probs.device)
        probs = torch.where(greedy, _one_hot(logits), probs)
    return probs


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """[N, 1] of the dtype and device of `like`; [1, 1] where all are the same."""
    if len(set(values)) == 1:
        values = values[:1]
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)[:, None]


def _one_hot(logits: Tensor) -> Tensor:
    """The argmax as a point mass."""
    best, place = logits.max(-1, keepdim=True)
    # A logit that is no number must not become a certainty: it makes the row NaN.
    return torch.zeros_like(logits).scatter_(-1, place, 1.0) + 0.0 * best


def _keep_top_k(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Scores [N, V] with all below the k-th largest of their row at -inf; ties stay."""
    vocab_size = scores.shape[-1]
    ks = [s.top_k if 0 < s.top_k < vocab_size else vocab_size for s in samplings]
    widest = max(k for k in ks if k < vocab_size)
    places = torch.tensor([min(k, widest) - 1 for k in ks], device=scores.device)
    kth = scores.topk(widest, dim=-1).values.gather(1, places.expand(len(scores))[:, None])
    unbounded = torch.tensor([k == vocab_size for k in ks], device=scores.device)[:, None]
    return scores.masked_fill((scores < kth) & ~unbounded, -torch.inf)


def _keep_nucleus(scores: Tensor, top_p: Tensor) -> Tensor:
    """Scores [N, V] with all but the smallest set of at least `top_p` mass at -inf.

    Args:
        scores: [N, V].
        top_p: [N, 1] or [1, 1]; 1 keeps the row as it is.
    """
    normaliser = scores.logsumexp(-1, keepdim=True)
    first_look = min(_NUCLEUS_FIRST_LOOK, scores.shape[-1])
    # A device would have to be asked whether the first look is enough; sorting is cheaper.
    if scores.is_cuda:
        first_look = scores.shape[-1]
    values, indices = scores.topk(first_look, dim=-1)
    before = _mass_before(values, normaliser)
    if first_look < scores.shape[-1] and bool(((before[:, -1:] < top_p) & (top_p < 1)).any()):
        values, indices = scores.sort(dim=-1, descending=True)
        before = _mass_before(values, normaliser)
    kept = values.masked_fill(before >= top_p, -torch.inf)
    nucleus = torch.full_like(scores, -torch.inf).scatter_(-1, indices, kept)
    return torch.where(top_p < 1, nucleus, scores)


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
    # The first sum beyond the point belongs to a positive weight: sums grow only there.
    point = uniforms.double()[:, None] * sums[:, -1:]
    first = torch.searchsorted(sums, point, right=True)
    # Where rounding leaves no sum beyond, the first to reach the total is the last positive.
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    # Weights that are no numbers have no last sum; whoever drew from them has to notice.
    return torch.minimum(first, last).clamp(max=weights.shape[-1] - 1)[:, 0]
