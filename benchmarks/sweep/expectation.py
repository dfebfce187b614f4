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
from torch import Tensor

from benchmarks.measure.ratio import ratio
from benchmarks.sweep.recorded import Recorder, Rounds, Texts
from tandem.speculation.proposal import Proposal
from target_svc.verifiers import VERIFIERS

# Where rounds begin, as shares of a text's length.
_STARTS = (0.25, 0.5, 1.0)


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
        rule: "token" keeps up to the first failure, "block" up to the last success.
        rounds: drafts of gamma tokens or more.
        gamma: to cut them to.
    """
    proposal = Proposal.from_dense(rounds.tokens[:, :gamma], rounds.q[:, :gamma].double())
    h = VERIFIERS[rule].accept_probabilities(proposal, rounds.p[:, : gamma + 1].double())
    if rule == "token":
        at_least = h.cumprod(1)
    else:
        # At least i are kept iff any row from i on passes.
        none_passes = (1 - h).flip(1).cumprod(1).flip(1)
        at_least = 1 - none_passes
    return 1 + at_least.sum(1)


def expectations(
    recorder: Recorder, texts: Iterable[Texts], gammas: tuple[int, ...]
) -> list[Expectation]:
    """Token against block verification at each gamma, on the same recorded rounds."""
    sums: dict[tuple[str, int], list[float]] = {}
    for batch in texts:
        length = batch.tokens.shape[1] - batch.prompt
        starts = [batch.prompt + int(length * share) for share in _STARTS]
        recorded = [recorder.rounds(batch.tokens[:, :start], max(gammas)) for start in starts]
        for gamma in gammas:
            for rule in ("token", "block"):
                emitted = sum(expected_emitted(rule, rounds, gamma) for rounds in recorded)
                assert isinstance(emitted, Tensor)
                sums.setdefault((rule, gamma), []).extend(emitted.tolist())
    return [_expectation(gamma, sums["token", gamma], sums["block", gamma]) for gamma in gammas]


def _expectation(gamma: int, token: list[float], block: list[float]) -> Expectation:
    rounds = np.full(len(token), float(len(_STARTS))).tolist()
    return Expectation(
        gamma,
        len(token),
        len(token) * len(_STARTS),
        *ratio(token, rounds),
        *ratio(block, rounds),
        *ratio(block, token),
    )
