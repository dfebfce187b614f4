"""`verify` agrees with the rule's two other methods, for ragged batches and edge cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tandem.speculation.distribution import draw
from tandem.speculation.proposal import Proposal
from tandem.verification import VERIFIERS, Verifier
from tests.support.laws.laws import Tables

RULES = sorted(VERIFIERS.values(), key=lambda rule: rule.name)
GAMMA, VOCAB_SIZE = 3, 5


def random_batch(batch: int, seed: int) -> tuple[Proposal, torch.Tensor, torch.Tensor]:
    tables = Tables.random(VOCAB_SIZE, GAMMA + 1, seed, zeros=True)
    generator = torch.Generator().manual_seed(seed)
    prefixes = torch.randint(VOCAB_SIZE, (batch,), generator=generator)
    drafts, prefix = [], prefixes
    for _ in range(GAMMA):
        drafts.append(torch.multinomial(tables.q[prefix], 1, generator=generator)[:, 0])
        prefix = tables.extend(prefix, drafts[-1])
    proposal, target_probs, _ = tables.block(prefixes, torch.stack(drafts, 1))
    uniforms = torch.rand(batch, GAMMA + 1, generator=generator, dtype=torch.float64)
    return proposal, target_probs, uniforms


def levels_of(rule: Verifier[Any], carry: Any) -> list[tuple[float, int]]:
    """A state as it travels."""
    return rule.levels_of(rule.pack([carry], GAMMA)[0].tolist())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_verify_agrees_with_both_methods(rule: Verifier[Any]) -> None:
    carry = None
    # Without the first candidate: some rules keep none then, the others up to the last that passed.
    all_but_first = torch.arange(GAMMA)[None] > 0
    to_first_failure = not rule.count_accepted(all_but_first).any()
    for seed in range(5):
        proposal, target_probs, uniforms = random_batch(64, seed)
        verdict = rule.verify(proposal, target_probs, uniforms, carry)
        given = carry or [None] * 64
        h = rule.accept_probabilities(proposal, target_probs, given)
        assert h.shape == (64, GAMMA)
        assert ((h >= 0) & (h <= 1)).all()
        for b in range(64):
            passed = (uniforms[b, :GAMMA] < h[b]).tolist()
            if to_first_failure:
                expected = [*passed, False].index(False)
            else:
                expected = max((i + 1 for i in range(GAMMA) if passed[i]), default=0)
            assert verdict.num_accepted[b] == expected
        weights = rule.residual_weights(proposal, target_probs, verdict.num_accepted, given)
        assert torch.equal(verdict.next_token, draw(weights, uniforms[:, -1]))
        carry = verdict.carry


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_ragged_batch_equals_its_sequences_alone(rule: Verifier[Any]) -> None:
    proposal, target_probs, uniforms = random_batch(12, 3)
    first = rule.verify(proposal, target_probs, uniforms)
    carry = [c if b % 2 else None for b, c in enumerate(first.carry)]
    lengths = torch.arange(12) % (GAMMA + 1)
    ragged = Proposal.from_dense(proposal.tokens, proposal.probs, lengths)
    verdict = rule.verify(ragged, target_probs, uniforms, carry)
    assert (verdict.num_accepted <= lengths).all()
    for b, length in enumerate(lengths.tolist()):
        alone = Proposal.from_dense(proposal.tokens[[b], :length], proposal.probs[[b], :length])
        columns = torch.cat((uniforms[[b], :length], uniforms[[b], -1:]), 1)
        single = rule.verify(alone, target_probs[[b], : length + 1], columns, [carry[b]])
        assert single.num_accepted[0] == verdict.num_accepted[b]
        assert single.next_token[0] == verdict.next_token[b]
        together, apart = verdict.carry[b], single.carry[0]
        if together is not None:
            ours, theirs = (levels_of(rule, carry) for carry in (together, apart))
            assert len(ours) == len(theirs)
            assert np.allclose(ours, theirs)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_u_equal_to_h_equal_to_0_is_a_rejection(rule: Verifier[Any]) -> None:
    """`u <= h` would keep a token that the target never emits."""
    target_probs = torch.tensor([[[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]]])
    proposal = Proposal.from_dense(torch.tensor([[1]]), torch.tensor([[[0.0, 1.0, 0.0]]]))
    verdict = rule.verify(proposal, target_probs, torch.zeros(1, 2, dtype=torch.float64))
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.next_token.tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_identical_models_keep_everything(rule: Verifier[Any], dtype: torch.dtype) -> None:
    proposal, _, uniforms = random_batch(64, 1)
    q = proposal.probs.to(dtype)
    target_probs = torch.cat((q, torch.full((64, 1, VOCAB_SIZE), 0.2, dtype=dtype)), 1)
    same = Proposal.from_dense(proposal.tokens, q)
    verdict = rule.verify(same, target_probs, uniforms.clamp(max=1 - 2**-20))
    assert (verdict.num_accepted == GAMMA).all()


def test_at_temperature_0_all_rules_are_prefix_match() -> None:
    generator = torch.Generator().manual_seed(0)
    drafted = torch.randint(3, (200, GAMMA), generator=generator)
    wanted = torch.randint(3, (200, GAMMA + 1), generator=generator)
    one_hot = torch.nn.functional.one_hot
    proposal = Proposal.from_dense(drafted, one_hot(drafted, 3).float())
    target_probs = one_hot(wanted, 3).float()
    uniforms = torch.rand(200, GAMMA + 1, generator=generator, dtype=torch.float64)
    matching = (drafted == wanted[:, :GAMMA]).long().cumprod(1).sum(1)
    for rule in RULES:
        verdict = rule.verify(proposal, target_probs, uniforms)
        assert torch.equal(verdict.num_accepted, matching)
        assert torch.equal(verdict.next_token, wanted.gather(1, matching[:, None])[:, 0])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_no_draft_is_plain_decoding(rule: Verifier[Any]) -> None:
    probs = torch.tensor([[[0.25, 0.5, 0.25]]]).expand(3, 1, 3)
    proposal = Proposal.from_dense(torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, 0, 3))
    verdict = rule.verify(proposal, probs, torch.tensor([[0.1], [0.5], [0.9]]).double())
    assert verdict.num_accepted.tolist() == [0, 0, 0]
    assert verdict.next_token.tolist() == [0, 1, 2]


def test_every_rule_says_whether_it_is_lossless() -> None:
    for name, rule in VERIFIERS.items():
        assert name == rule.name
        assert rule.lossless == (not name.startswith("lossy_"))
