"""Exact laws of rounds whose drafts are trees, over every draft that a program may draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.asks import Review
from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.verification import VERIFIERS, Verifier
from tests.support.laws.trees.programs import Models, Program, batch_of, grown

Numbers = Callable[[Proposal], Tensor]


def stops(
    rule: Verifier[Any], proposal: Proposal, h: Tensor, shared: Numbers | None = None
) -> Tensor:
    """[B, N+1]: law of the kept place, from the nodes' probabilities to pass [B, N].

    Args:
        rule: whose `stop` is used.
        proposal: the drafts.
        h: the probabilities.
        shared: gives [B, N]: nodes with equal values share one random number; None for none.
    """
    law = h.new_zeros(h.shape[0], h.shape[1] + 1)
    groups = None if shared is None else shared(proposal)
    patterns = _patterns(h.shape[1])
    if groups is None and proposal.branches is None:  # where a chain ends hangs on nothing else
        weights = torch.where(patterns[:, None], h, 1 - h).prod(-1)
        return law.index_add_(1, rule.stop(proposal, patterns), weights.T)
    failed = 1 - h
    for pattern in patterns:
        passed = pattern.expand(h.shape)
        if groups is None:
            weight = torch.where(pattern, h, failed).prod(-1)
        else:
            weight = _together(h, passed, groups)
        if weight.any():
            law.scatter_add_(1, rule.stop(proposal, passed)[:, None], weight[:, None])
    return law


@cache
def _patterns(nodes: int) -> Tensor:
    """[2^N, N]: every set of nodes that may pass."""
    sets = list(product((False, True), repeat=nodes))
    return torch.tensor(sets, dtype=torch.bool)


def told_of(draft: Draft) -> Any:
    """All that a rule is told of a draft, to be hashed."""
    rows = draft.ids.tobytes(), draft.weights.tobytes(), tuple(draft.rows_of_nodes())
    return tuple(draft.token_ids), tuple(draft.places()), tuple(draft.sizes), draft.distinct, rows


def reviewed(ask: Review, p: npt.NDArray[np.float64]) -> tuple[list[float], list[list[float]]]:
    """The chance of each place where a guess may end, and of each token there."""
    rule, proposal = VERIFIERS[ask.rule], Proposal.from_drafts([ask.guess])
    judged = rule.judged(proposal, torch.from_numpy(p)[None])
    accept = (judged.accept() * ask.leniency).clamp(max=1)
    chances: list[float] = stops(rule, proposal, accept)[0].tolist()
    places = map(torch.tensor, [[place] for place in range(len(chances))])
    return chances, [judged.residual(place)[0].tolist() for place in places]


def _together(h: Tensor, passed: Tensor, groups: Tensor) -> Tensor:
    """[B]: the probability of a pattern, if one random number decides each group."""
    weight = h.new_ones(len(h))
    for group in range(h.shape[1]):
        own = groups == group
        least = torch.where(own & passed, h, 1.0).amin(-1)
        most = torch.where(own & ~passed, h, 0.0).amax(-1)
        weight = weight * (least - most).clamp(min=0)
    return weight


def round_law(
    rule: Verifier[Any],
    program: Program,
    models: Models,
    length: int,
    shared: Numbers | None = None,
) -> tuple[Tensor, float]:
    """[R * V ** length]: exact law of the first `length` tokens of rounds of a program's drafts.

    Integrates the uniforms out through the rule's judgement and its `stop`, over as many rounds as
    the tokens need.

    Returns:
        The law, root by root, and the mean number of tokens that the first round keeps.
    """
    size, kept = models.vocab_size, 0.0
    offset = models.roots * sum(size**n for n in range(length))
    law = torch.zeros(models.roots * size**length, dtype=torch.float64)
    pending: dict[int, dict[int, float]] = {n: {} for n in range(length)}
    tokens = torch.arange(size)
    pending[0] = dict.fromkeys(range(models.roots), 1.0)
    for emitted in range(length):
        # In order, so that rules which reach the same prefixes share their drafts.
        states = dict(sorted(pending[emitted].items()))
        if not states:
            continue
        batch = batch_of(program, models, tuple(states))
        proposal, target_probs = batch.proposal, models.p[batch.prefixes]
        mass = torch.tensor(list(states.values()), dtype=torch.float64)
        weight = batch.weight * mass[batch.start]
        assert proposal.branches is not None
        depths = proposal.branches.tree.depth
        cut = grown(proposal, batch.prefixes[:, 0], models, length - emitted)
        judged = rule.judged(proposal, target_probs)
        chances = stops(rule, proposal, judged.accept(), shared)
        if not emitted:
            kept = float((weight[:, None] * chances * depths).sum()) / models.roots
        for place in range(chances.shape[1]):
            at = torch.full_like(proposal.lengths, place)
            residual = judged.residual(at)
            after = (
                (weight * chances[:, place])[:, None] * residual / residual.sum(-1, keepdim=True)
            )
            live = chances[:, place] > 0  # a shorter draft has no such place
            after, depth, ends = after[live], depths[live, place], cut[live, place, None]
            reached = (emitted + depth + 1)[:, None].expand(after.shape)
            last = torch.where(reached > length, ends, ends * size + tokens + models.roots)
            law.index_add_(0, last[reached >= length] - offset, after[reached >= length])
            going = (reached < length) & (after > 0)
            rounds = zip(
                reached[going].tolist(), last[going].tolist(), after[going].tolist(), strict=True
            )
            for to, state, mass in rounds:
                pending[to][state] = pending[to].get(state, 0.0) + mass
    return law, kept
