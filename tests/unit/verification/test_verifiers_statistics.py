"""Faults that no single round shows, found in the joint law over several rounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from tandem.verification import VERIFIERS
from tests.support.laws.laws import Tables, chi_square_p_value

VOCAB_SIZE, GAMMA, LENGTH, TEXTS = 3, 3, 4, 60_000
LONGEST = LENGTH + 2 * GAMMA

Draw = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
Uniforms = Callable[[int, Tensor], Tensor]


def p_value(draw_draft: Draw, uniforms: Uniforms, tables: Tables) -> float:
    """Run rounds of block verification until every text has LENGTH tokens."""
    rule = VERIFIERS["block"]
    prefixes = torch.zeros(TEXTS, dtype=torch.int64)
    lengths = torch.zeros(TEXTS, dtype=torch.int64)
    for round_ in range(LENGTH):
        tokens, q, drafted = draw_draft(round_, prefixes, tables.q)
        _, target_probs, _ = tables.block(prefixes, tokens)
        verdict = rule.verify(
            Proposal.from_dense(tokens, q, drafted), target_probs, uniforms(round_, lengths)
        )
        emitted = torch.cat((tokens, torch.zeros(TEXTS, 1, dtype=torch.int64)), 1)
        emitted.scatter_(1, verdict.num_accepted[:, None], verdict.next_token[:, None])
        for i in range(GAMMA + 1):
            live = (i <= verdict.num_accepted) & (lengths < LENGTH)
            prefixes = torch.where(live, tables.extend(prefixes, emitted[:, i]), prefixes)
            lengths = lengths + live
    offset = sum(VOCAB_SIZE**n for n in range(LENGTH))
    counts = np.bincount((prefixes - offset).numpy(), minlength=VOCAB_SIZE**LENGTH)
    return chi_square_p_value(counts, tables.autoregressive_law(LENGTH).numpy())


@pytest.fixture
def tables() -> Tables:
    return Tables.random(VOCAB_SIZE, LONGEST, seed=8, zeros=False)


def sample_draft(
    prefixes: Tensor, rows: Tensor, sampled_from: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Tokens drawn from one table, with the rows of another, [B, G] and [B, G, V]."""
    tokens, q = [], []
    for _ in range(GAMMA):
        tokens.append(torch.multinomial(sampled_from[prefixes], 1, generator=generator)[:, 0])
        q.append(rows[prefixes])
        prefixes = prefixes * VOCAB_SIZE + tokens[-1] + 1
    return torch.stack(tokens, 1), torch.stack(q, 1)


def honest(generator: torch.Generator) -> Draw:
    def draft(round_: int, prefixes: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, rows = sample_draft(prefixes, q, q, generator)
        return tokens, rows, torch.full((TEXTS,), GAMMA)

    return draft


def fresh(generator: torch.Generator) -> Uniforms:
    return lambda round_, lengths: torch.rand(
        TEXTS, GAMMA + 1, generator=generator, dtype=torch.float64
    )


def test_the_rule_passes(tables: Tables) -> None:
    generator = torch.Generator().manual_seed(1)
    assert p_value(honest(generator), fresh(generator), tables) > 1e-3


def test_a_uniform_reused_across_rounds_is_caught(tables: Tables) -> None:
    """Keyed by position alone, a row's number decides again in the next round."""
    generator = torch.Generator().manual_seed(2)
    by_position = torch.rand(TEXTS, LONGEST + 1, generator=generator, dtype=torch.float64)

    def reused(round_: int, lengths: Tensor) -> Tensor:
        places = lengths[:, None] + torch.arange(GAMMA)
        last = torch.rand(TEXTS, 1, generator=generator, dtype=torch.float64)
        return torch.cat((by_position.gather(1, places), last), 1)

    assert p_value(honest(generator), reused, tables) < 1e-6


def test_q_truncated_after_sampling_is_caught(tables: Tables) -> None:
    generator = torch.Generator().manual_seed(3)

    def truncated(round_: int, prefixes: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, rows = sample_draft(prefixes, q, q, generator)
        kept = rows * (rows >= rows.topk(2, -1).values[..., -1:])
        kept = kept / kept.sum(-1, keepdim=True)
        return tokens, kept, torch.full((TEXTS,), GAMMA)

    assert p_value(truncated, fresh(generator), tables) < 1e-6


def test_a_weak_drafted_token_withdrawn_is_caught(tables: Tables) -> None:
    generator = torch.Generator().manual_seed(4)

    def withdrawn(round_: int, prefixes: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, rows = sample_draft(prefixes, q, q, generator)
        weak = rows.gather(-1, tokens[..., None])[..., 0] < 0.4
        return tokens, rows, (~weak).long().cumprod(1).sum(1)

    assert p_value(withdrawn, fresh(generator), tables) < 1e-6


def test_a_weak_drafted_token_kept_as_the_last_is_fine(tables: Tables) -> None:
    """The exact way to stop early: keep what was drawn, draft nothing after it."""
    generator = torch.Generator().manual_seed(5)

    def stopped(round_: int, prefixes: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, rows = sample_draft(prefixes, q, q, generator)
        weak = rows.gather(-1, tokens[..., None])[..., 0] < 0.4
        strong_before = torch.cat((torch.ones(TEXTS, 1), (~weak[:, :-1]).float()), 1)
        return tokens, rows, strong_before.cumprod(1).sum(1).long()

    assert p_value(stopped, fresh(generator), tables) > 1e-3
