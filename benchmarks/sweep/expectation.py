"""Block efficiency of a rule as an exact expectation over its own randomness.

Free-running texts of different rules part ways, and their block efficiencies differ by
chance alone. Here every rule is given the same recorded drafts, and its acceptance
probabilities say what it would accept on average. What is left is the choice of the drafts,
which is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.measure.ratio import ratio
from benchmarks.sweep.recorded import Recorder, Rounds, Texts
from tandem.speculation.proposal import Proposal
from tandem.speculation.tree import Tree
from tandem.verification import VERIFIERS

# Where rounds begin, as shares of a text's length.
STARTS = (0.25, 0.5, 1.0)
# Rules that go on from the root until nothing passes.
_FIRST_FAILURE = frozenset({"token", "spectr"})


@dataclass(frozen=True)
class Expectation:
    """Block efficiencies on the same rounds; standard errors are over texts."""

    gamma: int
    texts: int
    rounds: int
    token: float
    token_se: float
    block: float
    block_se: float
    block_to_token: float
    block_to_token_se: float


def expected_emitted(rule: str, rounds: Rounds, gamma: int) -> Tensor:
    """[S]: tokens that a round yields on average, accepted + 1, over the rule's randomness.

    Args:
        rule: that decides chains.
        rounds: drafts of gamma tokens or more.
        gamma: to cut them to.
    """
    proposal = Proposal.from_dense(rounds.tokens[:, :gamma], rounds.q[:, :gamma].double())
    return 1 + expected_kept(rule, proposal, rounds.p[:, : gamma + 1].double())


def expected_kept(rule: str, proposal: Proposal, target_probs: Tensor) -> Tensor:
    """[B]: how many drafted tokens a rule keeps on average, over its own randomness.

    Nodes pass independently of each other, and the rule's way of stopping says which of those
    that passed counts; a walk over the nodes in the order in which it looks at them adds up what
    2^N patterns would.

    Args:
        rule: without a state between rounds.
        proposal: chains or trees, as the rule takes them.
        target_probs: [B, N+1, V].
    """
    h = VERIFIERS[rule].accept_probabilities(proposal, target_probs)
    if proposal.branches is None:
        return h.cumprod(1).sum(1) if rule in _FIRST_FAILURE else _last_success(h)
    tree = proposal.branches.tree
    if rule in _FIRST_FAILURE:
        return _first_passed_child(tree, h)
    # `block` looks at children before their parents, `gbv` at what is deepest.
    order = tree.order if rule == "block" else -tree.depth[:, 1:]
    looked_at = order.argsort(dim=1, stable=True)
    h, home = h.gather(1, looked_at), tree.home.gather(1, looked_at)
    none_before = pad((1 - h).cumprod(1)[:, :-1], (1, 0), value=1.0)
    return (tree.depth.gather(1, home) * h * none_before).sum(1)


def _last_success(h: Tensor) -> Tensor:
    """At least i are kept iff any row from i on passes."""
    none_passes = (1 - h).flip(1).cumprod(1).flip(1)
    return (1 - none_passes).sum(1)


def _first_passed_child(tree: Tree, h: Tensor) -> Tensor:
    """From the root on to the first child that passes, as far as one does."""
    kept = h.new_zeros(len(h))
    reached = h.new_zeros(len(h), h.shape[1] + 1)
    reached[:, 0] = 1
    for level in tree.levels:
        missed = h.new_zeros(0)
        for rank, siblings in enumerate(level):
            batch, node = siblings.batch, siblings.node
            chance = h[batch, node]
            missed = missed[siblings.before] if rank else torch.ones_like(chance)
            arrives = reached[batch, siblings.place] * missed * chance
            reached.index_put_((batch, tree.home[batch, node]), arrives, accumulate=True)
            kept.index_add_(0, batch, arrives)
            missed = missed * (1 - chance)
    return kept


def expectations(
    recorder: Recorder, texts: Iterable[Texts], gammas: tuple[int, ...]
) -> list[Expectation]:
    """Token against block verification at each gamma, on the same recorded rounds."""
    sums: dict[tuple[str, int], list[float]] = {}
    for batch in texts:
        length = batch.tokens.shape[1] - batch.prompt
        starts = [batch.prompt + int(length * share) for share in STARTS]
        recorded = [recorder.rounds(batch.tokens[:, :start], max(gammas)) for start in starts]
        for gamma in gammas:
            for rule in ("token", "block"):
                emitted = sum(expected_emitted(rule, rounds, gamma) for rounds in recorded)
                assert isinstance(emitted, Tensor)
                sums.setdefault((rule, gamma), []).extend(emitted.tolist())
    return [_expectation(gamma, sums["token", gamma], sums["block", gamma]) for gamma in gammas]


def _expectation(gamma: int, token: list[float], block: list[float]) -> Expectation:
    rounds = np.full(len(token), float(len(STARTS))).tolist()
    return Expectation(
        gamma,
        len(token),
        len(token) * len(STARTS),
        *ratio(token, rounds),
        *ratio(block, rounds),
        *ratio(block, token),
    )
