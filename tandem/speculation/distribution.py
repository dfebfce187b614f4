"""From logits to the distribution that a token is drawn from, and the draw itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.speculation.categorical import largest, likeliest
from tandem.speculation.request.sampling import Sampling

# Top-p looks at this many of the most likely tokens first: sorting five rows of a
# 128,256-token vocabulary takes 25 times as long as their top 256.
_NUCLEUS_FIRST_LOOK = 256
# A smaller temperature would be 0 in float32 and a larger one infinite, and 0 / 0 is NaN.
_COLDEST, _HOTTEST = 1e-30, 1e30


def process(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """The processed distributions: temperature, then top-k, then top-p, then min-p.

    A row depends on its own logits and parameters alone, whatever shares its batch. Of equally
    likely tokens top-k keeps all or none, top-p those of the lowest ids.

    Args:
        logits: [N, V], any floating dtype.
        samplings: one per row, or one for all; temperature 0 gives the one-hot argmax.

    Returns:
        [N, V] probabilities, float32 (float64 for float64 logits).
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    distinct = {id(sampling): sampling for sampling in samplings}.values()  # of rows of a text one
    if all(sampling.greedy for sampling in distinct):
        return _one_hot(logits)
    scores = logits
    if any(s.temperature != 1 for s in distinct):
        temperatures = [min(max(s.temperature, _COLDEST), _HOTTEST) for s in samplings]
        # (l - max l) / T; if T is 1, softmax itself subtracts the maximum.
        scores = (logits - logits.amax(-1, keepdim=True)).div_(_column(temperatures, logits))
    if any(s.top_p < 1 for s in distinct):
        probs = _nucleus(scores, samplings)
    else:
        probs = _keep_top_k(scores, samplings).softmax(-1)
    if any(s.min_p > 0 for s in distinct):
        probs = _keep_min_p(probs, _column([s.min_p for s in samplings], probs))
    if any(s.greedy for s in distinct):
        greedy = _sent(torch.tensor([[s.greedy] for s in samplings]), probs)
        probs = torch.where(greedy, _one_hot(logits), probs)
    return probs


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """[N, 1] of the dtype and device of `like`; [1, 1] if all values are equal."""
    if len(set(values)) == 1:
        values = values[:1]
    return _sent(torch.tensor(values, dtype=like.dtype), like)[:, None]


def _sent(values: Tensor, like: Tensor) -> Tensor:
    """Copy to the device of `like`, without waiting for its work."""
    return values.to(like.device, non_blocking=True)


def _one_hot(logits: Tensor) -> Tensor:
    """The argmax as a point mass."""
    best, place = largest(logits)
    # A NaN or infinite logit must not become a certainty. It is looked for in the first column.
    nothing = 0.0 * best
    found = torch.zeros_like(logits).scatter_(-1, place, 1.0 + nothing)
    found[..., :1] += nothing
    return found


def _keep_top_k(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Scores [N, V]; those below the k-th largest of their row become -inf, ties stay."""
    vocab_size = scores.shape[-1]
    ks = [s.top_k if 0 < s.top_k < vocab_size else vocab_size for s in samplings]
    widest = max((k for k in ks if k < vocab_size), default=0)
    if not widest:
        return scores
    places = _sent(torch.tensor([min(k, widest) - 1 for k in ks]), scores)
    # Only numbers are needed, not which of equal ones comes first: a device need not sort for it.
    top = scores.topk(widest).values if scores.is_cuda else likeliest(scores, widest)[0]
    kth = top.gather(1, places.expand(len(scores))[:, None])
    unbounded = _sent(torch.tensor([[k == vocab_size] for k in ks]), scores)
    return scores.masked_fill((scores < kth) & ~unbounded, -torch.inf)


def _nucleus(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Probabilities of the smallest set of tokens with at least `top_p` mass of what top-k keeps, 0
    elsewhere; a row whose `top_p` is 1 keeps all of that.

    Args:
        scores: [N, V].
        samplings: of the rows.
    """
    # To find out which rows need more than a first look would synchronise with a device.
    if scores.is_cuda or scores.shape[-1] <= _NUCLEUS_FIRST_LOOK:
        return _whole_nucleus(scores, samplings)
    values, ids = likeliest(scores, _NUCLEUS_FIRST_LOOK)
    seen = None
    if any(0 < s.top_k < scores.shape[-1] for s in samplings):
        values, normaliser, seen = _few_of_top_k(scores, values, samplings)
    else:
        normaliser = _log_of_sum(scores)
    top_p = _column([s.top_p for s in samplings], scores)
    kept, before = _within(values, normaliser, top_p)
    probs = torch.zeros_like(scores).scatter_(-1, ids, kept)
    covered = (before[:, -1:] >= top_p) & (top_p < 1)
    if seen is not None:
        covered &= seen
    if not covered.all():
        for row in (~covered).nonzero()[:, 0].tolist():
            own = samplings[row] if len(samplings) > 1 else samplings[0]
            probs[row] = _whole_nucleus(scores[row : row + 1], [own])
    return probs


def _log_of_sum(scores: Tensor) -> Tensor:
    """[N, 1] log of the sum of exp. In rows of 152,000 torch's own takes twice as long."""
    return scores.amax(-1, keepdim=True) - scores.softmax(-1).amax(-1, keepdim=True).log()


def _few_of_top_k(
    scores: Tensor, values: Tensor, samplings: Sequence[Sampling]
) -> tuple[Tensor, Tensor, Tensor]:
    """Top-k within the first look.

    Returns:
        values [N, L], -inf where top-k cuts; [N, 1] the logsumexp of all that top-k keeps; [N, 1]
        whether the first look has all of that, True for rows without top-k.
    """
    ks = torch.tensor([s.top_k if s.top_k < scores.shape[-1] else 0 for s in samplings])[:, None]
    look = values.shape[1]
    kth = values.gather(1, (ks - 1).clamp(0, look - 1).expand(len(values), 1))
    few = values.masked_fill((ks > 0) & (values < kth), -torch.inf)
    normaliser = few.logsumexp(-1, keepdim=True)
    if not ks.all():
        normaliser = torch.where(ks > 0, normaliser, _log_of_sum(scores))
    return few, normaliser, (ks == 0) | (ks < look) & (values[:, -1:] < kth)


def _whole_nucleus(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """See `_nucleus`; all tokens are put in order."""
    scores = _keep_top_k(scores, samplings)
    if all(s.top_p == 1 for s in samplings):
        return scores.softmax(-1)
    top_p = _column([s.top_p for s in samplings], scores)
    values, ids = likeliest(scores, scores.shape[-1])
    kept, _ = _within(values, scores.logsumexp(-1, keepdim=True), top_p)
    nucleus = torch.zeros_like(scores).scatter_(-1, ids, kept)
    return torch.where(top_p < 1, nucleus, scores.softmax(-1))


def _within(values: Tensor, normaliser: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [N, L] of the tokens up to `top_p`, and what is before each.

    Args:
        values: [N, L] scores, descending.
        normaliser: [N, 1] log of the sum of all.
        top_p: [N, 1] or [1, 1].
    """
    probs = (values - normaliser).exp()
    # Nothing is before the likeliest token, so that one is always kept.
    before = probs.cumsum(-1).sub_(probs)
    return values.masked_fill(before >= top_p, -torch.inf).softmax(-1), before


def _keep_min_p(probs: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens less likely than `min_p` [N, 1] times the likeliest one; 0 keeps all."""
    kept = torch.where(probs < min_p * probs.amax(-1, keepdim=True), 0.0, probs)
    return kept.div_(torch.where(min_p > 0, kept.sum(-1, keepdim=True), 1.0))


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token from each row of unnormalised weights by inverse CDF.

    Never draws a token of weight 0: not at u = 0, and not if rounding makes u times the total
    reach the last partial sum. Does not synchronise with the host.

    Args:
        weights: [B, V], >= 0, each row with a positive sum.
        uniforms: [B] float64 in [0, 1).

    Returns:
        [B] int64 token ids.
    """
    sums = weights.double().cumsum(-1)
    # The first sum above the point belongs to a positive weight: sums only grow at these.
    point = uniforms.double()[:, None] * sums[:, -1:]
    first = torch.searchsorted(sums, point, right=True)
    # If rounding leaves none, the first sum that equals the total is the last positive weight's.
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    # With NaN weights the result is arbitrary but valid; the caller must detect them.
    return torch.minimum(first, last).clamp(max=weights.shape[-1] - 1)[:, 0]
