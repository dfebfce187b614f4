"""Expected tokens of trees, and the recorded rounds that they are taken over."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.recorded_trees.comparisons import (
    ALONE,
    COMPARISONS,
    DEEP,
    cases_of,
    compared,
    plan_of,
)
from benchmarks.recorded_trees.methods import Plan, proposal_of, rows_of
from benchmarks.recorded_trees.wire import wire_of
from benchmarks.sweep.branching import Grown, Node, grow, path_of
from benchmarks.sweep.expectation import expected_kept
from tandem.drafting.shape import likeliest
from tandem.verification import VERIFIERS
from tests.support.laws.drafters import chains, fixed, mixed
from tests.support.laws.tree_laws import stops
from tests.support.laws.tree_programs import Models, Program, batch_of
from tests.support.repository import ROOT

DRAFTER = ROOT / "models" / "drafter"
PROGRAMS = [
    (fixed("2x2, distinct", [0, 0, 1, 1, 2, 2], distinct=True), ["token", "block"]),
    (fixed("uneven", [0, 1, 0, 3, 0]), ["token", "block"]),
    (mixed("two drafters", [(0, 0), (0, 1), (1, 1), (2, 0)]), ["token", "block"]),
    (chains(3, 2), ["token", "block", "spectr", "gbv"]),
    (chains(2, 3), ["token", "block", "spectr", "gbv"]),
]


@pytest.mark.parametrize(("program", "rules"), PROGRAMS, ids=lambda each: getattr(each, "name", ""))
def test_a_walk_adds_up_what_all_patterns_do(program: Program, rules: Sequence[str]) -> None:
    """Against 2^N patterns through the rule's own `stop`, twins among them."""
    models = Models.random(4, 5, zeros=True, drafters=2)
    batch = batch_of(program, models, (0,))
    assert batch.proposal.branches is not None
    depth = batch.proposal.branches.tree.depth
    target_probs = models.p[batch.prefixes]
    for name in rules:
        h = VERIFIERS[name].accept_probabilities(batch.proposal, target_probs)
        expected = (stops(VERIFIERS[name], batch.proposal, h) * depth).sum(1)
        found = expected_kept(name, batch.proposal, target_probs)
        assert float((found - expected).abs().max()) < 1e-12


def test_rows_behind_a_node_are_those_of_its_path() -> None:
    """Siblings and cousins do not see each other; positions are depths."""
    model = AutoModelForCausalLM.from_pretrained(DRAFTER, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    contexts = torch.randint(1, 2000, (3, 9), generator=generator)
    nodes = [Node(0), Node(0, 0, (0,)), Node(1), Node(2), Node(1, 1), Node(5, 1), Node(0, 1)]
    grown = grow([model, model], model, contexts, nodes, generator)
    with torch.inference_mode():
        for node, drawn in enumerate(nodes):
            path = path_of(nodes, node)
            whole = torch.cat((contexts, grown.tokens[:, path]), 1)
            rows = model(whole).logits[:, -2:].softmax(-1)
            torch.testing.assert_close(grown.p[:, node + 1], rows[:, 1], atol=1e-5, rtol=0)
            torch.testing.assert_close(grown.q[:, node], rows[:, 0], atol=1e-5, rtol=0)
            assert all((grown.tokens[:, node] != grown.tokens[:, i]).all() for i in drawn.without)


def made_up(plan: Plan, vocab_size: int) -> Grown:
    """Tokens and rows that do not fit each other."""
    generator = torch.Generator().manual_seed(0)
    count = len(plan.nodes)
    rows = torch.rand(200, 2 * count + 1, vocab_size, generator=generator).softmax(-1)
    tokens = torch.randint(vocab_size, (200, count), generator=generator)
    return Grown(tokens, rows[:, :count], rows[:, count:])


def test_a_tree_is_built_around_the_chain() -> None:
    plan = Plan(5)
    shape = likeliest((0.7, 0.2), 4, 9)
    tree = plan.tree("tree", shape)
    assert set(plan.chain(4).nodes) <= set(tree.nodes)
    assert len(set(tree.nodes)) == len(tree.nodes) == 9
    grown = made_up(plan, 300)
    branches = proposal_of(tree, plan.nodes, grown).branches
    assert branches is not None
    assert branches.tree.parents[0].tolist() == shape.parents()
    for node in tree.nodes:
        siblings = [each for each in tree.nodes if plan.nodes[each].place == plan.nodes[node].place]
        assert plan.nodes[node].without == tuple(siblings[: siblings.index(node)])


def test_merged_chains_share_their_beginnings() -> None:
    plan = Plan(3)
    drafted = plan.chains("2x3", [range(3), plan.path(3)])
    grown = made_up(plan, 2)
    branches = proposal_of(drafted, plan.nodes, grown).branches
    assert branches is not None
    twins = 0
    for tokens, parents, home in zip(
        grown.tokens[:, list(drafted.nodes)].tolist(),
        branches.tree.parents.tolist(),
        branches.tree.home.tolist(),
        strict=True,
    ):
        if tokens[0] == tokens[1]:
            assert parents[2:4] == [1, 1]
            assert home[1] == 1
            twins += 1
        else:
            assert parents[2:4] == [1, 2]
        same = tokens[:4:2] == tokens[1:4:2]
        assert (parents[4] == parents[5]) == same
    assert 50 < twins < 150
    assert rows_of(drafted, grown).shape == (200, 7, 2)


def test_every_comparison_is_of_recorded_drafts() -> None:
    plan, drafts = plan_of((0.7, 0.1, 0.05), boosted=True)
    cases = cases_of(drafts)
    assert {case for each in COMPARISONS for case in (each.case, each.base)} <= set(cases)
    assert {node for drafted in drafts.values() for node in drafted.nodes} == set(
        range(len(plan.nodes))
    )
    assert all(len(drafts[name].nodes) == 16 for name in (ALONE, DEEP, "4 chains of 4"))
    # One drafter alone has no forest, and all else.
    alone = cases_of(plan_of((0.7, 0.1, 0.05), boosted=False)[1])
    assert set(cases) - set(alone) == {case for case in cases if "boosted" in case[1]}


def test_a_ratio_is_of_sums_over_texts() -> None:
    sums = {("token", ALONE): [4.0, 8.0, 6.0], ("token", "chain of 4"): [2.0, 4.0, 3.0]}
    (found,) = compared(sums)
    assert (found.ratio, found.ratio_se, found.met) == (2.0, 0.0, True)
    sums["token", ALONE] = sums["token", "chain of 4"]
    assert compared(sums)[0].met is False


def test_a_row_of_an_inner_place_is_sent_once() -> None:
    plan = Plan(3)
    tree = plan.tree("tree", likeliest((0.7, 0.6), 2, 4))
    grown = made_up(plan, 300)
    narrow, wide = (wire_of(tree, plan.nodes, grown, support) for support in (16, 300))
    inner = len({plan.nodes[node].place for node in tree.nodes})
    assert (inner, len(tree.nodes)) == (3, 4)
    assert 0 < narrow.bytes_a_round - inner * 16 * 6 < 60
    assert narrow.bytes_a_round < wide.bytes_a_round
    assert wide.overlap_lost < 0.01 < narrow.overlap_lost
