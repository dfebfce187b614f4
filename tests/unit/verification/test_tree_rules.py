"""Rules on trees are lossless: exact enumeration over drafters' programs, in float64."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.speculation.tree import DraftShape
from tandem.verification import VERIFIERS
from tests.support.laws.drafters import adaptive, chains, fixed, mixed, random_program
from tests.support.laws.trees.laws import round_law
from tests.support.laws.trees.mutants import MUTANTS, UNSEEN, Mutant
from tests.support.laws.trees.programs import Models, Program

LARGE = pytest.mark.campaign(
    "the law of 2x3 and 3x2 merged chains",
    "2x2, 1x3 and 3x1 (this file)",
)

TOLERANCE = 1e-12
LENGTH = 3
# Half of them have zeros, each with another row after each of its texts.
SEEDS = range(6)
WITHOUT_ZEROS = range(1, 6, 2)
TREES = [
    fixed("chain of 3", [0, 1, 2]),
    fixed("2x2", [0, 0, 1, 1, 2, 2]),
    fixed("2x2, distinct", [0, 0, 1, 1, 2, 2], distinct=True),
    fixed("uneven", [0, 1, 0, 3, 0]),
    fixed("uneven, distinct", [0, 0, 0, 2, 4], distinct=True),
    mixed("two drafters", [(0, 0), (0, 1), (1, 1), (2, 0)]),
    mixed("two drafters, distinct", [(0, 0), (0, 1), (1, 1), (1, 0)], distinct=True),
    mixed("certain siblings", [(0, None), (0, None), (1, None), (2, None)], distinct=True),
    mixed("certain and drawn", [(0, None), (0, 0), (1, 0), (2, None), (2, 1)]),
    mixed("drawn and certain, distinct", [(0, 0), (0, None), (1, 0), (2, None)], distinct=True),
    chains(2, 2, merged=False),
    adaptive(),
    adaptive("follows what it drew, independent", distinct=False),
]
FOR_TREES = [rule.name for rule in VERIFIERS.values() if rule.takes is DraftShape.TREE]
FOR_IID = [rule.name for rule in VERIFIERS.values() if rule.takes is DraftShape.IID_CHAINS]
IID = [chains(1, 3), chains(2, 2), chains(3, 1), chains(3, 2), chains(2, 3)]


@cache  # several programs draw from the same
def models_of(seeds: Sequence[int]) -> tuple[Models, Tensor]:
    models = Models.of_seeds(LENGTH + 3, seeds, drafters=2)
    return models, models.law(LENGTH)


def errors(program: Program, rules: list[str], seeds: range) -> dict[str, float]:
    models, expected = models_of(seeds)
    laws = {rule: round_law(VERIFIERS[rule], program, models, LENGTH)[0] for rule in rules}
    return {rule: float((law - expected).abs().max()) for rule, law in laws.items()}


@pytest.mark.parametrize("program", TREES, ids=lambda program: program.name)
def test_a_tree_leaves_the_law_as_it_is(program: Program) -> None:
    assert max(errors(program, FOR_TREES, SEEDS).values()) < TOLERANCE


def marked(program: Program) -> ParameterSet:
    """The largest programs take 20 s each, and smaller ones show what they show."""
    is_large = program.name in ("2x3 merged", "3x2 merged")
    return pytest.param(program, marks=LARGE if is_large else ())


@pytest.mark.parametrize("program", list(map(marked, IID)), ids=lambda program: program.name)
def test_independent_chains_leave_the_law_as_it_is(program: Program) -> None:
    assert max(errors(program, FOR_IID + FOR_TREES, SEEDS).values()) < TOLERANCE


@pytest.mark.parametrize("distinct", [False, True])
def test_no_drafter_that_keeps_the_contract_errs(distinct: bool) -> None:
    """Sixty that choose place, drafter, kind of row and end by all that they have drawn.

    Those of a kind are enumerated at once, each in models of its own.
    """
    drafters = {seed: random_program(seed) for seed in range(60)}
    seeds = tuple(seed for seed, drafter in drafters.items() if drafter.distinct == distinct)
    assert len(seeds) > 20
    together = Program.of_roots("random", [drafters[seed] for seed in seeds])
    models, expected = models_of(seeds)
    for rule in ("token", "block"):
        law, _ = round_law(VERIFIERS[rule], together, models, LENGTH)
        of_each = (law - expected).abs().view(len(seeds), -1).amax(-1)
        assert float(of_each.max()) < TOLERANCE, (rule, seeds[int(of_each.argmax())])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_enumeration_catches(mutant: Mutant, capsys: pytest.CaptureFixture[str]) -> None:
    error = mutant.error(models_of(WITHOUT_ZEROS)[0])
    with capsys.disabled():
        sys.stdout.write(f"\n{mutant.name} ({mutant.rule.name}): {error:.1e} ")
    assert error > 5e-4


@pytest.mark.parametrize("mutant", UNSEEN, ids=lambda mutant: mutant.name)
def test_token_cannot_see_what_cousins_share(mutant: Mutant) -> None:
    """Why keys are tested by `block`."""
    assert mutant.error(models_of(WITHOUT_ZEROS)[0]) < TOLERANCE


def chains_of(batch: int, gamma: int, vocab_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens [B, G], rows of q [B, G, V] and of p [B, G+1, V], float32."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(batch, 2 * gamma + 1, vocab_size, generator=generator) ** 3
    rows = rows.masked_fill(torch.rand(rows.shape, generator=generator) < 0.2, 0.0)
    rows[..., 0] += 0.01
    rows = rows / rows.sum(-1, keepdim=True)
    q, p = rows[:, :gamma].contiguous(), rows[:, gamma:].contiguous()
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(batch, gamma)
    return tokens, q, p


@pytest.mark.parametrize("name", ["token", "block"])
def test_a_tree_of_one_branch_is_the_chain(name: str) -> None:
    """Verdict for verdict, in float32, on 10,000 rounds."""
    rule, gamma = VERIFIERS[name], 4
    tokens, q, p = chains_of(10_000, gamma, 7, seed=1)
    numbers = torch.rand(10_000, gamma + 1, dtype=torch.float64)
    tree = Proposal.from_dense(tokens, q, parents=[range(gamma)] * len(tokens))
    own = rule.verify(tree, p, numbers)
    plain = rule.verify(Proposal.from_dense(tokens, q), p, numbers)
    assert own.num_accepted.tolist() == own.place.tolist() == plain.num_accepted.tolist()
    assert own.next_token.tolist() == plain.next_token.tolist()
    assert 0 < plain.num_accepted.double().mean() < gamma


@pytest.mark.parametrize("name", ["spectr", "gbv"])
def test_a_chain_alone_is_decided_as_by_the_rule_for_chains(name: str) -> None:
    like = {"spectr": "token", "gbv": "block"}[name]
    tokens, q, p = chains_of(500, 3, 7, seed=2)
    numbers = torch.rand(500, 4, dtype=torch.float64)
    proposal = Proposal.from_dense(tokens, q)
    verdict, expected = (VERIFIERS[n].verify(proposal, p, numbers) for n in (name, like))
    assert verdict.next_token.tolist() == expected.next_token.tolist()
    assert verdict.num_accepted.tolist() == expected.num_accepted.tolist()


def draft_of(seed: int, vocab_size: int, parents: list[int], *, distinct: bool) -> Draft:
    """Siblings of one place share a row, as those of a drafter do."""
    random = np.random.default_rng(seed)
    places = sorted(set(parents))
    row_of = [places.index(place) for place in parents]
    ids = [np.empty(0, np.uint32)]
    weights = [np.empty(0, np.uint16)]
    for _ in places:
        size = int(random.integers(4, vocab_size))
        ids.append(random.permutation(vocab_size)[:size].astype(np.uint32))
        weights.append(random.integers(1, 60_000, size).astype(np.uint16))
        weights[-1][0] = 65_535
    tokens: list[int] = []
    for i, row in enumerate(row_of):
        taken = [tokens[j] for j in range(i) if distinct and parents[j] == parents[i]]
        tokens.append(int(random.choice([t for t in ids[row + 1] if t not in taken])))
    sizes = [len(one) for one in ids[1:]]
    return Draft(
        tokens, sizes, np.concatenate(ids), np.concatenate(weights), parents, row_of, distinct
    )


SHAPES = [[0, 0, 0, 1, 1, 2, 4], [0, 1, 2, 3], [0, 0], [], [0, 0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("name", ["token", "block"])
def test_a_draft_is_decided_alone_as_beside_others(name: str, distinct: bool) -> None:
    rule, vocab_size = VERIFIERS[name], 11
    drafts = [
        draft_of(seed, vocab_size, SHAPES[seed % len(SHAPES)], distinct=distinct)
        for seed in range(40)
    ]
    together = Proposal.from_drafts(drafts)
    most = together.tokens.shape[1]
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(len(drafts), most + 1, vocab_size, generator=generator).softmax(-1)
    numbers = torch.rand(len(drafts), most + 1, generator=generator, dtype=torch.float64)
    verdict = rule.verify(together, p, numbers)
    for b, draft in enumerate(drafts):
        own = [*range(len(draft)), most]
        alone = rule.verify(
            Proposal.from_drafts([draft]), p[[b], : len(draft) + 1], numbers[[b]][:, own]
        )
        assert alone.place.tolist() == [verdict.place[b]]
        assert alone.next_token.tolist() == [verdict.next_token[b]]


def test_what_siblings_left_is_exact() -> None:
    """Integers over integers: 1 - q in float32 may have nothing left."""
    draft = Draft(
        [5, 6, 7],
        [4],
        np.array([5, 6, 7, 8], np.uint32),
        np.array([65_535, 3, 2, 1], np.uint16),
        [0, 0, 0],
        [0, 0, 0],
        True,
    )
    shares = [1.0, float(Fraction(6, 65_541)), float(Fraction(3, 65_541))]
    assert draft.left_by_siblings() == shares
    proposal = Proposal.from_drafts([draft])
    p = torch.tensor([[[0.0] * 5 + [0.2, 0.3, 0.3, 0.2]]]).expand(1, 4, 9)
    h = VERIFIERS["token"].accept_probabilities(proposal, p)
    # Of 5 nearly all is lost; 6 to 8 are left with 3:3:2 of p and 3:2:1 of q, then 1:2 and 2:1.
    assert h[0].tolist() == pytest.approx([0.2 * 65_541 / 65_535, 0.75, 0.5], rel=1e-4)


def test_a_rule_for_chains_refuses_a_tree() -> None:
    proposal = Proposal.from_drafts([draft_of(1, 9, [0, 0], distinct=True)])
    with pytest.raises(ValueError, match="greedy_block takes chains alone"):
        VERIFIERS["greedy_block"].accept_probabilities(proposal, torch.ones(1, 3, 9) / 9)
