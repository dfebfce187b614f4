"""Drafts that a reviewer decides within a draft, for many sequences at once (cascades)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.engine.answers import ReviewAnswer
from tandem.engine.asks import Review
from tandem.engine.numbers.home import copy_to_host
from tandem.shaping.logits import shape
from tandem.speculation.categorical import Categorical
from tandem.speculation.distribution import draw, process
from tandem.speculation.proposal import Proposal
from tandem.verification import VERIFIERS

# Probabilities of a part, in float64: 64 MB for each of the three tensors of them.
_MOST = 1 << 23


def review(
    asks: Sequence[Review], logits: Tensor, firsts: Sequence[int]
) -> list[ReviewAnswer | None]:
    """What is kept of each ask's draft, and what follows; None where a distribution is not finite.

    The rule decides against the very rows that are handed out, in float64: their integers are
    the law that the kept tokens follow.

    Args:
        asks: at least one.
        logits: [R, V] of a pass.
        firsts: each ask's first row.
    """
    answers: list[ReviewAnswer | None] = [None] * len(asks)
    kinds: dict[tuple[object, ...], list[int]] = {}
    for place, ask in enumerate(asks):
        kinds.setdefault((ask.truncation, ask.rule, ask.leniency), []).append(place)
    for places in _bounded(asks, kinds.values(), logits.shape[1]):
        group = [asks[place] for place in places]
        found = _reviewed(group, logits, [firsts[place] for place in places])
        for place, answer in zip(places, found, strict=True):
            answers[place] = answer
    return answers


def _bounded(
    asks: Sequence[Review], kinds: Iterable[Sequence[int]], vocab_size: int
) -> Iterator[list[int]]:
    """The same places in parts whose rows, padded to the longest guess, take little memory."""
    for places in kinds:
        part: list[int] = []
        longest = 0
        for place in sorted(places, key=lambda place: len(asks[place].guess)):
            longest = max(longest, len(asks[place].guess))
            if part and (len(part) + 1) * (longest + 1) * vocab_size > _MOST:
                yield part
                part = []
            part.append(place)
        yield part


def _reviewed(
    asks: Sequence[Review], logits: Tensor, firsts: Sequence[int]
) -> list[ReviewAnswer | None]:
    """Of asks that share rule, leniency and truncation."""
    rows, starts = _rows(asks, logits, firsts)
    weights = rows.weights.double()
    law = weights / weights.sum(-1, keepdim=True).clamp(min=1)
    proposal = Proposal.from_drafts([ask.guess for ask in asks], logits.device)
    # A guess may have ids that the reviewer has not; it never keeps them.
    widest = max(logits.shape[1], *(1 + max(ask.guess.token_ids, default=0) for ask in asks))
    dense = law.new_zeros(len(law), widest).scatter_(1, rows.ids, law)
    places = proposal.tokens.shape[1] + 1
    index = [
        [start + min(place, ask.feed.rows - 1) for place in range(places)]
        for ask, start in zip(asks, starts, strict=True)
    ]
    p = dense[torch.tensor(index).to(logits.device, non_blocking=True)]
    uniforms = np.ones((len(asks), places))
    for own, ask in zip(uniforms, asks, strict=True):
        own[: len(ask.guess)], own[-1] = ask.uniforms[:-1], ask.uniforms[-1]
    kept, following = _decided(asks[0], proposal, p, torch.from_numpy(uniforms).to(p.device))
    there = copy_to_host([kept, following, rows.ids, rows.weights])
    each = enumerate(zip(asks, starts, strict=True))
    return [_told(ask, b, start, there) for b, (ask, start) in each]


def _rows(
    asks: Sequence[Review], logits: Tensor, firsts: Sequence[int]
) -> tuple[Categorical, list[int]]:
    """The rows of all asks, as they would be sent, and each ask's first one."""
    chosen = [
        first + row for ask, first in zip(asks, firsts, strict=True) for row in range(ask.feed.rows)
    ]
    own = logits.index_select(0, torch.tensor(chosen).to(logits.device, non_blocking=True))
    starts, shaped, end = [], [], 0
    for ask in asks:
        starts.append(end)
        if ask.shaped is not None:
            shaped.append((end, ask.shaped))
        end += ask.feed.rows
        own[starts[-1] : end, ask.vocab_size :] = -torch.inf
    if shaped:
        own = shape(own, shaped)
    probs = process(own, [ask.sampling for ask in asks for _ in range(ask.feed.rows)])
    truncation = asks[0].truncation
    return Categorical.quantize(probs, truncation.mass, truncation.support), starts


def _decided(ask: Review, proposal: Proposal, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """[B] tokens that are kept, and [B] the token after them."""
    rule = VERIFIERS[ask.rule]
    if ask.leniency == 1:
        verdict = rule.verify(proposal, p, uniforms)
        return verdict.place, verdict.next_token
    judged = rule.judged(proposal, p)
    place = rule.stop(proposal, uniforms[:, :-1] < (judged.accept() * ask.leniency).clamp(max=1))
    return place, draw(judged.residual(place), uniforms[:, -1])


def _told(ask: Review, b: int, start: int, there: Sequence[np.ndarray]) -> ReviewAnswer | None:
    kept, following, ids, weights = there
    count = int(kept[b])
    tokens = ask.guess.token_ids[:count]
    if count < ask.feed.rows:
        tokens = [*tokens, int(following[b])]
    if not weights[start : start + ask.feed.rows].any(1).all():
        return None
    rows = []
    for row in range(start, start + len(tokens)):
        sent = weights[row] > 0
        rows.append((ids[row][sent].astype(np.uint32), weights[row][sent].astype(np.uint16)))
    return ReviewAnswer(count, tokens, rows)
