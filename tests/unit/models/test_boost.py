"""The data that a second drafter is tuned on, and how the drafter is measured."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.zoo.boost import DEEPER, covered, uncovered
from tandem.speculation.proposal import Proposal
from tandem.verification import VERIFIERS


def rows(generator: torch.Generator, *shape: int) -> Tensor:
    return (1.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)).softmax(-1)


def test_what_it_covers_is_what_the_rule_gives_a_second_sibling() -> None:
    """By `token`: all first tokens by their chances, second ones without replacement."""
    generator = torch.Generator().manual_seed(1)
    size = 5
    p, first, second = (rows(generator, size) for _ in range(3))
    exact = 0.0
    for one in range(size):
        for other in range(size):
            if one == other:
                continue
            tree = Proposal.from_dense(
                torch.tensor([[one, other]]),
                torch.stack((first, second))[None],
                parents=[[0, 0]],
                distinct=True,
            )
            h = VERIFIERS["token"].accept_probabilities(tree, p.expand(1, 3, -1))[0]
            weight = first[one] * second[other] / (1 - second[one])
            exact += float(weight * (1 - h[0]) * h[1])
    many = 60_000
    found = covered(p.expand(many, -1), first.expand(many, -1), second.expand(many, -1), generator)
    assert float(found.mean()) == pytest.approx(exact, abs=5 * float(found.std()) / many**0.5)


def test_the_objective_is_least_where_it_covers_all() -> None:
    """The residual where the first one misses; the target's own rows after what was covered."""
    generator = torch.Generator().manual_seed(2)
    p, first = rows(generator, 6, 7), rows(generator, 6, 7)
    left = (p - first).clamp(min=0)
    residual = left / left.sum(-1, keepdim=True)
    # Where the first one has what it wants of every token, nothing is covered, nor is deeper.
    likely = (first > p).long().argmax(-1)
    tokens = torch.cat((torch.zeros(1, dtype=torch.int64), likely[:-1]))
    args = (each[None] for each in (tokens, p, first, residual))
    assert float(uncovered(*args)) == pytest.approx(0, abs=1e-12)
    args = (each[None] for each in (tokens, p, first, rows(generator, 6, 7)))
    assert float(uncovered(*args)) > 0.05


def test_deeper_rows_count_behind_what_was_covered() -> None:
    """Four tokens of one text, the second of which the first drafter never draws."""
    p = torch.tensor([[0.5, 0.5], [0.4, 0.6], [0.3, 0.7], [0.9, 0.1]], dtype=torch.float64)
    first = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64)
    second = torch.tensor([[0.2, 0.8], [1.0, 0.0], [0.5, 0.5], [0.6, 0.4]], dtype=torch.float64)
    missed, wins = (0.5, 0.6, 0.7, 0.1), (0.4, 0.0, 0.35, 0.04)
    root = sum(m - w for m, w in zip(missed, wins, strict=True)) / 4
    # Token 1 came by the second drafter with 0.4 of 0.5; the tokens 0 after it never did.
    alone = (0.6, 0.2, 0.3)
    shares = (0.8 * alone[0] / 3, 0.8 * alone[1] / 2, 0.8 * alone[2])
    deeper = sum(weight * share for weight, share in zip(DEEPER, shares, strict=True))
    found = uncovered(torch.tensor([[0, 1, 0, 0]]), p[None], first[None], second[None])
    assert float(found) == pytest.approx(root + deeper, abs=1e-12)
