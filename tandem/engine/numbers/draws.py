"""Tokens drawn for many sequences at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.engine.asks import Draw
from tandem.engine.scorer import Scorer
from tandem.errors import EngineFailure
from tandem.inference.feed import DrawnToken, Draws, Feed
from tandem.kernels import draws as kernels
from tandem.kernels import operators
from tandem.shaping.logits import shape
from tandem.speculation.categorical import MAX_WEIGHT, Categorical
from tandem.speculation.distribution import process
from tandem.speculation.randomness import foresee
from tandem.speculation.sampler import sample


def not_finite(role: str) -> EngineFailure:
    """What a job fails with whose drafter, or target, computes no distribution."""
    return EngineFailure(f"the {role} computed a distribution that is not finite")


# Most tokens of a row for the CPU's kernel: the sum of their weights must stay below 2**31.
_FUSED_SUPPORT = 2**31 // MAX_WEIGHT


def draw(asks: Sequence[Draw], logits: Tensor, firsts: Sequence[int]) -> list[list[DrawnToken]]:
    """What is drawn for each ask: process, truncate, round, draw.

    Args:
        asks: at least one; of one truncation.
        logits: [R, V] of a pass.
        firsts: each ask's first row.
    """
    rows = [
        first + row
        for ask, first in zip(asks, firsts, strict=True)
        for row in (range(len(ask.counts)) if ask.rows is None else ask.rows)
    ]
    if _by_kernels(asks, logits):
        drawn = _drawn_by_kernels(asks, logits, rows)
        return _told(asks, drawn, rows)
    if rows != list(range(len(logits))):
        logits = logits.index_select(0, torch.tensor(rows).to(logits.device, non_blocking=True))
    each = [ask for ask in asks for _ in ask.counts]
    logits = _shaped(asks, _within_vocabulary(each, logits))
    siblings = max(count for ask in asks for count in ask.counts)
    earlier = _earlier(asks, logits.device)
    if all(ask.sampling.greedy for ask in asks):
        drawn = _likeliest(logits, siblings, earlier)
    elif siblings == 1 and earlier is None:
        drawn = _singles(each, logits, _digits(asks, 1)[:, 0])
    else:
        drawn = _siblings(each, logits, _digits(asks, siblings), earlier)
    if any(ask.confident and ask.sampling.greedy for ask in asks):
        drawn.confidence = _confidence(each, logits, drawn)
    return _told(asks, drawn, rows)


def _told(asks: Sequence[Draw], drawn: Draws, rows: Sequence[int]) -> list[list[DrawnToken]]:
    """Each ask's draws; those of one row of the pass share it."""
    if any(ask.rows is not None for ask in asks):
        first_of: dict[int, int] = {}
        drawn.same = [first_of.setdefault(row, place) for place, row in enumerate(rows)]
    return [
        [
            DrawnToken(drawn, row * drawn.siblings + rank)
            for row, count in own
            for rank in range(count)
        ]
        for own in _rows_of(asks)
    ]


def drawn_on(
    scorer: Scorer, asks: Sequence[Draw], firsts: Sequence[DrawnToken]
) -> list[list[DrawnToken]]:
    """The tokens after the first ones of chains, as far as they can be drawn without the host
    between them: as many for each, none where that is not possible.

    Args:
        scorer: of all asks.
        asks: at least one, of one truncation; each has some that follow.
        firsts: the token that each ask drew.
    """
    steps = min(ask.follow for ask in asks)
    size, digits = scorer.vocab_size, np.stack([_digits_behind(ask, steps) for ask in asks], 1)
    asked = kernels.asked_of(range(len(asks)), size, [ask.sampling for ask in asks], 1)
    asked[:, kernels.SIZE] = [min(ask.vocab_size, size) for ask in asks]
    each = np.repeat(asked[None], steps, 0)
    each[:, :, kernels.DIGITS :] = digits
    found: list[list[DrawnToken]] = [[] for _ in asks]
    while len(found[0]) < steps:
        feeds = [
            Feed(ask.feed.cache, own[-1] if own else first, 1)
            for ask, own, first in zip(asks, found, firsts, strict=True)
        ]
        packed = scorer.draw_on(feeds, each[len(found[0]) :])
        if packed is None:
            break
        together = packed.flatten(0, 1)
        drawn = Draws(*kernels.parts_of(together, 1), packed=together)
        for row, own in enumerate(found):
            own += [DrawnToken(drawn, at) for at in range(row, len(together), len(asks))]
    return found


def _digits_behind(ask: Draw, steps: int) -> np.ndarray:
    """[steps, 2]: the numbers after an ask's first one."""
    numbers = ask.numbers.take(ask.round, ask.nodes)
    return np.array(numbers[ask.node + 1 : ask.node + 1 + steps], np.int64)


def follows(ask: Draw, logits: Tensor) -> bool:
    """Whether a chain may go on after an ask without the host, by kernels of a GPU."""
    narrow = 0 < ask.truncation.support <= kernels.WIDEST
    return ask.follow > 0 and ask.scorer.chains and narrow and operators.take(logits)


def _by_kernels(asks: Sequence[Draw], logits: Tensor) -> bool:
    """Whether kernels of a GPU draw for these asks.

    Not where all take the likeliest token, which torch's maximum finds, or want to know how likely
    it is.
    """
    fits = 0 < asks[0].truncation.support <= kernels.WIDEST
    return (
        fits
        and operators.take(logits)
        and not all(ask.sampling.greedy for ask in asks)
        and not any(ask.confident and ask.sampling.greedy for ask in asks)
    )


def _drawn_by_kernels(asks: Sequence[Draw], logits: Tensor, rows: Sequence[int]) -> Draws:
    """Draws of all rows, in two launches; one copy goes to the device."""
    each = [ask for ask in asks for _ in ask.counts]
    size, siblings = logits.shape[1], max(count for ask in asks for count in ask.counts)
    if any(ask.shaped is not None for ask in asks):
        there = torch.tensor(rows).to(logits.device, non_blocking=True)
        logits, rows = _shaped(asks, logits.index_select(0, there)), range(len(rows))
    asked = kernels.asked_of(rows, size, [ask.sampling for ask in each], siblings)
    asked[:, kernels.SIZE] = [min(ask.vocab_size, size) for ask in each]
    asked[:, kernels.DISTINCT] = [ask.distinct for ask in each]
    asked[:, kernels.DIGITS :] = _digits(asks, siblings).reshape(len(each), 2 * siblings)
    earlier = _earlier(asks, logits.device)
    if earlier is None:
        earlier = torch.empty(len(each), 0, dtype=torch.int64, device=logits.device)
    cut = asks[0].truncation
    packed = kernels.draw(
        logits,
        torch.from_numpy(asked).to(logits.device, non_blocking=True),
        earlier,
        cut.mass,
        cut.support,
        siblings,
    )
    tokens, drawn = kernels.parts_of(packed, siblings)
    return Draws(tokens, drawn, siblings, packed=packed)


def _confidence(each: Sequence[Draw], logits: Tensor, drawn: Draws) -> Tensor:
    """See `Draws`."""
    own = logits.float().softmax(-1).gather(1, drawn.tokens.view(len(logits), -1))
    greedy = torch.tensor([[ask.confident and ask.sampling.greedy] for ask in each])
    return torch.where(greedy.to(own.device, non_blocking=True), own, torch.nan).flatten()


def _shaped(asks: Sequence[Draw], logits: Tensor) -> Tensor:
    """Logits [R, V] as the requests of their groups shape them."""
    if all(ask.shaped is None for ask in asks):
        return logits
    shaped, first = [], 0
    for ask in asks:
        if ask.shaped is not None:
            shaped.append((first, ask.shaped))
        first += len(ask.counts)
    return shape(logits, shaped)


def _rows_of(asks: Sequence[Draw]) -> Iterator[list[tuple[int, int]]]:
    """Of each ask, its rows of the draws and how many draws are after each."""
    first = 0
    for ask in asks:
        yield [(first + i, count) for i, count in enumerate(ask.counts)]
        first += len(ask.counts)


def _earlier(asks: Sequence[Draw], device: torch.device) -> Tensor | None:
    """[R, E] tokens that each row is drawn without, -1 for padding; None where there are none."""
    most = max(len(ask.earlier) for ask in asks)
    if not most:
        return None
    values = torch.full((sum(len(ask.counts) for ask in asks), most), -1, device=device)
    row = 0
    for ask in asks:
        for place, one in enumerate(ask.earlier):
            values[row, place] = one.draws.tokens[one.index]
        row += len(ask.counts)
    return values


def _likeliest(logits: Tensor, siblings: int, earlier: Tensor | None) -> Draws:
    if earlier is not None:
        ids = torch.arange(logits.shape[1], device=logits.device)
        logits = logits.masked_fill((ids == earlier[..., None]).any(1), -torch.inf)
    certain = Categorical.argmax(logits)
    if siblings == 1:
        return Draws(certain.ids[:, 0], certain, certain=True)
    tokens = logits.topk(min(siblings, logits.shape[1]), dim=-1).indices
    tokens = torch.nn.functional.pad(tokens, (0, siblings - tokens.shape[1]))
    # The first of equal ones, as without siblings.
    tokens[:, :1] = certain.ids
    return Draws(tokens.flatten(), certain, siblings, certain=True)


def _singles(each: Sequence[Draw], logits: Tensor, digits: np.ndarray) -> Draws:
    """A draw a row."""
    probs = process(logits, [ask.sampling for ask in each])
    mass, support = each[0].truncation.mass, each[0].truncation.support
    if not probs.is_cuda and 0 < support < _FUSED_SUPPORT:
        tokens, ids, weights = map(torch.from_numpy, sample(probs.numpy(), mass, support, digits))
        return Draws(tokens, Categorical(ids, weights))
    drawn = Categorical.quantize(probs, mass, support)
    there = torch.from_numpy(digits).to(probs.device, non_blocking=True)
    return Draws(drawn.draw(there), drawn)


def _siblings(
    each: Sequence[Draw], logits: Tensor, digits: np.ndarray, earlier: Tensor | None
) -> Draws:
    """Several draws a row, one rank after the other; from a row of which nothing is left, a token
    that was taken.

    Args:
        each: the ask of each row.
        logits: [R, V].
        digits: [R, siblings, 2].
        earlier: [R, E] tokens that were drawn at the row's place before, -1 for padding.
    """
    there = torch.from_numpy(digits).to(logits.device, non_blocking=True)
    if earlier is None:
        first = _singles(each, logits, np.ascontiguousarray(digits[:, 0]))
        rows, taken = first.rows, first.tokens
        left, tokens = rows.weights, [taken]
    else:
        truncation = each[0].truncation
        probs = process(logits, [ask.sampling for ask in each])
        rows = Categorical.quantize(probs, truncation.mass, truncation.support)
        # By the integer sums of what is left of the row.
        left = rows.weights.masked_fill((rows.ids[:, None] == earlier[..., None]).any(1), 0)
        drawn = Categorical(rows.ids, left).draw(there[:, 0])
        taken = torch.where(earlier[:, 0] >= 0, earlier[:, 0], drawn)
        tokens = [torch.where(left.sum(-1) > 0, drawn, taken)]
    distinct = torch.tensor([[ask.distinct] for ask in each]).to(left.device, non_blocking=True)
    for rank in range(1, digits.shape[1]):
        left = left.masked_fill(distinct & (rows.ids == tokens[-1][:, None]), 0)
        drawn = Categorical(rows.ids, left).draw(there[:, rank])
        tokens.append(torch.where(left.sum(-1) > 0, drawn, taken))
    return Draws(torch.stack(tokens, 1).flatten(), rows, digits.shape[1])


def _digits(asks: Sequence[Draw], siblings: int) -> np.ndarray:
    """[R, siblings, 2] of each row's own numbers."""
    unforeseen = [
        (ask.numbers, ask.round, ask.nodes)
        for ask in asks
        if not ask.numbers.covers(ask.round, ask.nodes)
    ]
    if unforeseen:
        foresee(unforeseen)
    values = np.zeros((sum(len(ask.counts) for ask in asks), siblings, 2), np.int64)
    row = 0
    for ask in asks:
        numbers, node = ask.numbers.take(ask.round, ask.nodes), ask.node
        for count in ask.counts:
            values[row, :count] = numbers[node : node + count]
            node, row = node + count, row + 1
    return values


def _within_vocabulary(asks: Sequence[Draw], logits: Tensor) -> Tensor:
    """Logits [B, V] without the ids that a request's target does not have."""
    vocab_size = logits.shape[1]
    if min(ask.vocab_size for ask in asks) >= vocab_size:
        return logits
    sizes = [min(ask.vocab_size, vocab_size) for ask in asks]
    if max(sizes) < vocab_size:
        logits = logits[:, : max(sizes)]
    for row, size in enumerate(sizes):
        if size < logits.shape[1]:
            logits[row, size:] = -torch.inf
    return logits
