"""Acceptance by sibling rank, measured offline."""

from __future__ import annotations

import pytest
import torch

from benchmarks.shapes import Rank, setting_of
from models.evaluate import kept_by_rank
from tandem.speculation.proposal import Proposal
from tandem.verification import VERIFIERS

DRAWS = 20_000


@pytest.mark.parametrize("seed", range(4))
def test_a_ranks_share_is_how_often_the_rule_keeps_it(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = (2 * torch.randn(2, 1, 7, generator=generator)).softmax(-1)
    siblings = torch.multinomial(q, 3, generator=generator)
    chances = kept_by_rank(p, q, siblings)[0]
    many = Proposal.from_dense(
        siblings.expand(DRAWS, -1),
        q.expand(DRAWS, 3, -1).double(),
        parents=[[0, 0, 0]] * DRAWS,
        distinct=True,
    )
    uniforms = torch.rand(DRAWS, 4, generator=generator, dtype=torch.float64)
    verdict = VERIFIERS["token"].verify(many, p.double().expand(DRAWS, 4, -1), uniforms)
    seen = torch.bincount(verdict.place, minlength=4)[1:] / DRAWS
    assert (seen - chances).abs().max() < 4 * 0.5 / DRAWS**0.5


def test_siblings_together_cover_no_less_than_the_first_one() -> None:
    """Averaged over draws the first is kept with Σ min(p, q)."""
    generator = torch.Generator().manual_seed(4)
    p, q = torch.randn(2, 1, 9, generator=generator).softmax(-1)
    count = 20_000
    rows = p.expand(count, -1), q.expand(count, -1)
    siblings = torch.multinomial(rows[1], 3, generator=generator)
    found = kept_by_rank(*rows, siblings).mean(0)
    assert found[0] == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.01)
    assert 0 < found[1] < found[0]


def test_a_setting_falls_and_ends_where_little_is_left() -> None:
    def ranks(*shares: float) -> list[Rank]:
        return [Rank(i, share, 0.001) for i, share in enumerate(shares, 1)]

    assert setting_of(ranks(0.7312, 0.0814, 0.0353)) == [0.731, 0.081, 0.035]
    assert setting_of(ranks(0.7, 0.0004, 0.0003)) == [0.7]
    assert setting_of(ranks(0.7, 0.01, 0.02)) == [0.7, 0.01]
