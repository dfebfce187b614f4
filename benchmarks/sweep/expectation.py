"""Block efficiency of a rule as an exact expectation over its own randomness.

Free-running texts of different rules diverge, and their block efficiencies then also differ by
chance. Here every rule gets the same recorded drafts, and its acceptance probabilities give what it
would accept on average. The only randomness left is in the drafts, which are the same for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.measure.ratio import ratio
from benchmarks.sweep.recorded import Recorder, Rounds, Texts
from tandem.speculation.proposal import Proposal
from tandem.verification import VERIFIERS

# Where rounds begin, as shares of a text's length.
STARTS = (0.25, 0.5, 1.0)


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
    """[S]: mean tokens of a round, accepted + 1, over the rule's randomness.

    Rows pass independently of each other. `token` keeps all before the first that fails; `block`
    keeps all up to the last that passes.

    Args:
        rule: `token` or `block`.
        rounds: drafts of gamma tokens or more.
        gamma: length to cut the drafts to.
    """
    proposal = Proposal.from_dense(rounds.tokens[:, :gamma], rounds.q[:, :gamma].double())
    target_probs = rounds.p[:, : gamma + 1].double()
    h = VERIFIERS[rule].accept_probabilities(proposal, target_probs)
    if rule == "token":
        return 1 + h.cumprod(1).sum(1)
    none_passes_from = (1 - h).flip(1).cumprod(1).flip(1)
    return 1 + (1 - none_passes_from).sum(1)


def expectations(
    recorder: Recorder, texts: Iterable[Texts], gammas: tuple[int, ...]
) -> list[Expectation]:
    """Token and block verification compared at each gamma, on the same recorded rounds."""
    sums: dict[tuple[str, int], list[float]] = {}
    for batch in texts:
        length = batch.tokens.shape[1] - batch.prompt
        starts = [batch.prompt + int(length * share) for share in STARTS]
        recorded = [recorder.rounds(batch.tokens[:, :start], max(gammas)) for start in starts]
        for gamma in gammas:
            for rule in ("token", "block"):
                emitted = torch.stack([expected_emitted(rule, one, gamma) for one in recorded])
                sums.setdefault((rule, gamma), []).extend(emitted.sum(0).tolist())
    return [_expectation(gamma, sums["token", gamma], sums["block", gamma]) for gamma in gammas]


def _expectation(gamma: int, token: list[float], block: list[float]) -> Expectation:
    rounds = [float(len(STARTS))] * len(token)
    return Expectation(
        gamma,
        len(token),
        len(token) * len(STARTS),
        *ratio(token, rounds),
        *ratio(block, rounds),
        *ratio(block, token),
    )
