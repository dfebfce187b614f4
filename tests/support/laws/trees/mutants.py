"""Wrong rules and drafters that look right: the enumeration must detect each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from tandem.speculation.tree_batch import TreeBatch
from tandem.verification import Verifier
from tandem.verification.block import BlockVerifier
from tandem.verification.ratios import ratios
from tandem.verification.recursive import RecursiveJudged, RecursiveRejection
from tandem.verification.spectr import KSeq, SpectrJudged, SpecTrVerifier
from tandem.verification.token import TokenVerifier
from tandem.verification.traversal import Traversal, TraversalJudged
from tandem.verification.tree import TreeNodes, TreeRule, excess_or
from tests.support.laws.drafters import chains, fixed
from tests.support.laws.trees.laws import Numbers, round_law
from tests.support.laws.trees.programs import Models, Node, Program

_TREE = [0, 0, 1, 1, 2, 2]


def rule_of(base: type[Verifier[Any]], form: TreeRule) -> Verifier[Any]:
    """A rule with another form for trees."""

    class Mutant(base):  # type: ignore[misc, valid-type]
        trees: ClassVar[TreeRule | None] = form

    return Mutant()


class _Independent(RecursiveJudged):
    """SpecSplit: every sibling is judged against the target's own row."""

    def accept(self) -> Tensor:
        nodes = self.nodes
        h = nodes.p.new_zeros(nodes.tokens.shape)
        for level in nodes.tree.levels:
            for siblings in level:
                token = nodes.token(siblings)
                p = nodes.p[siblings.batch, siblings.place].gather(1, token)
                step = ratios(p, nodes.q(siblings).gather(1, token))[:, 0]
                h[siblings.batch, siblings.node] = step.clamp(max=1)
        return h


class _FirstResidual(RecursiveJudged):
    def residual(self, place: Tensor) -> Tensor:
        nodes = self.nodes
        p = nodes.p_at(place)
        _, there = nodes.child(place, 0)
        law, _ = excess_or(p - nodes.q_of_child(place, 0), p)
        return torch.where(there[:, None], law, p)


class _ParentsRow(RecursiveJudged):
    def residual(self, place: Tensor) -> Tensor:
        nodes = self.nodes
        _, inner = nodes.child(place, 0)
        parents = torch.nn.functional.pad(nodes.tree.parents, (1, 0))
        above = parents.gather(1, place[:, None])[:, 0]
        return torch.where(inner[:, None], super().residual(place), nodes.p_at(above))


class _Judges(RecursiveRejection):
    def __init__(self, judged: type[RecursiveJudged]) -> None:
        self._judged = judged

    def judge(self, proposal: Proposal, target_probs: Tensor) -> RecursiveJudged:
        return self._judged(TreeNodes.of(proposal, target_probs))


class _LongestPath(_Judges):
    """The deepest node whose ancestors passed too."""

    def stop(self, tree: TreeBatch, passed: Tensor) -> Tensor:
        alive = torch.ones(len(passed), 1, dtype=torch.bool)
        for node in range(passed.shape[1]):
            above = alive.gather(1, tree.parents[:, [node]])
            alive = torch.cat((alive, above & passed[:, [node]]), 1)
        return (tree.depth * alive).argmax(1)


class _UnloweredParent(Traversal):
    def judge(self, proposal: Proposal, target_probs: Tensor) -> TraversalJudged:
        judged = super().judge(proposal, target_probs)
        return TraversalJudged(judged.nodes, judged.arrived, judged.arrived)


class _OldRow(Traversal):
    """Later siblings are judged against the row as it was before the earlier ones."""

    def judge(self, proposal: Proposal, target_probs: Tensor) -> TraversalJudged:
        judged = super().judge(proposal, target_probs)
        nodes, arrived, after = judged.nodes, judged.arrived.clone(), judged.after.clone()
        for level in nodes.tree.levels:
            for siblings in level:
                batch, node = siblings.batch, siblings.node
                token = nodes.token(siblings)
                p = nodes.p[batch, siblings.place].gather(1, token)
                step = ratios(p, nodes.q(siblings).gather(1, token))[:, 0]
                came = (arrived[batch, siblings.place] * step).clamp(max=1)
                leaf = nodes.tree.children[batch, node + 1, 0] < 0
                arrived[batch, node + 1] = came
                after[batch, node + 1] = torch.where(leaf, came, after[batch, node + 1])
        return TraversalJudged(nodes, arrived, after)


class _SmallFactor(KSeq):
    def judge(self, proposal: Proposal, target_probs: Tensor) -> SpectrJudged:
        judged = super().judge(proposal, target_probs)
        return SpectrJudged(judged.nodes, 0.9 * judged.rho)


def _siblings(proposal: Proposal) -> Tensor:
    """One random number for all children of a place."""
    assert proposal.branches is not None
    return proposal.branches.tree.parents


def _cousins(proposal: Proposal) -> Tensor:
    """One random number for the first children of all places of a depth, one for the second, ..."""
    assert proposal.branches is not None
    tree = proposal.branches.tree
    groups = torch.zeros_like(tree.parents)
    for depth, level in enumerate(tree.levels):
        for rank, siblings in enumerate(level):
            groups[siblings.batch, siblings.node] = depth * len(level) + rank
    return groups


def _repeat_dropped(nodes: Sequence[Node], rows: Sequence[list[float]]) -> Sequence[int]:
    return [i for i, node in enumerate(nodes) if node.token not in [n.token for n in nodes[:i]]]


def _sorted(nodes: Sequence[Node], rows: Sequence[list[float]]) -> Sequence[int]:
    return sorted(range(len(nodes)), key=lambda i: -rows[i][nodes[i].token])


def _weak_leaf_withdrawn(nodes: Sequence[Node], rows: Sequence[list[float]]) -> Sequence[int]:
    strong = rows[-1][nodes[-1].token] >= 0.4
    return range(len(nodes) if strong else len(nodes) - 1)


def _reranked(nodes: Sequence[Node], rows: Sequence[list[float]]) -> Sequence[int]:
    """The likelier two of three, in the order in which they were drawn."""
    best = sorted(range(len(nodes)), key=lambda i: -rows[i][nodes[i].token])[:2]
    return sorted(best)


def _drawn(
    places: Sequence[int], *, likeliest: bool = False, numbers: Sequence[int] | None = None
) -> Program:
    def following(nodes: Sequence[Node]) -> Node | None:
        if len(nodes) == len(places):
            return None
        number = None if numbers is None else numbers[len(nodes)]
        return Node(places[len(nodes)], 0, likeliest=likeliest, number=number)

    return Program("drawn", following)


def _edited(places: Sequence[int], edit: Any, *, distinct: bool = False) -> Program:
    return Program("edited", _drawn(places).next, distinct, edit=edit)


def _claimed(places: Sequence[int], *, drawn: bool, said: bool) -> Program:
    return Program("claimed", _drawn(places).next, drawn, said)


TOKEN, BLOCK, SPECTR = TokenVerifier(), BlockVerifier(), SpecTrVerifier()


@dataclass(frozen=True)
class Mutant:
    """A mistake, in a case that shows it."""

    name: str
    rule: Verifier[Any]
    program: Program
    shared: Numbers | None = None

    def error(self, models: Models, length: int = 3) -> float:
        """The greatest error of a text's law."""
        law, _ = round_law(self.rule, self.program, models, length, self.shared)
        return float((law - models.law(length)).abs().max())


_WIDE = fixed("2x2", _TREE)
SPLIT = rule_of(TokenVerifier, _Judges(_Independent))
MUTANTS = [
    Mutant("siblings judged independently", SPLIT, _WIDE),
    Mutant(
        "residual after the first sibling only",
        rule_of(TokenVerifier, _Judges(_FirstResidual)),
        _WIDE,
    ),
    Mutant("bonus from the parent's row", rule_of(TokenVerifier, _Judges(_ParentsRow)), _WIDE),
    Mutant(
        "longest of independent judgements",
        rule_of(TokenVerifier, _LongestPath(_Independent)),
        _WIDE,
    ),
    Mutant("traversal: parent not lowered", rule_of(BlockVerifier, _UnloweredParent()), _WIDE),
    Mutant("traversal: old row for later siblings", rule_of(BlockVerifier, _OldRow()), _WIDE),
    Mutant(
        "k-SEQ: a factor that is too small", rule_of(SpecTrVerifier, _SmallFactor()), chains(2, 2)
    ),
    Mutant("k-SEQ: draws without replacement", SPECTR, _claimed([0, 0], drawn=True, said=False)),
    Mutant(
        "drawn without replacement, claimed independent",
        TOKEN,
        _claimed([0, 0, 1], drawn=True, said=False),
    ),
    Mutant("a repeated draw dropped", TOKEN, _edited([0, 0], _repeat_dropped)),
    Mutant("siblings sorted after the draw", TOKEN, _edited([0, 0], _sorted, distinct=True)),
    Mutant("a weak leaf withdrawn", TOKEN, _edited([0, 1], _weak_leaf_withdrawn)),
    Mutant("reranked and cut", BLOCK, _edited([0, 0, 0], _reranked)),
    Mutant("likeliest tokens with drawn rows", TOKEN, _drawn([0, 1], likeliest=True)),
    Mutant("one accept number for siblings", TOKEN, fixed("", [0, 0, 0]), _siblings),
    Mutant("one accept number for cousins", BLOCK, fixed("", [0, 0, 1, 2]), _cousins),
    Mutant("one draw number for siblings", TOKEN, _drawn([0, 0], numbers=[1, 1])),
    Mutant("one draw number for cousins", BLOCK, _drawn([0, 0, 1, 2], numbers=[1, 2, 3, 3])),
]
# `token` uses the number of only one cousin, so a shared number cannot show.
UNSEEN = [
    Mutant("one accept number for cousins", TOKEN, fixed("", [0, 0, 1, 2]), _cousins),
    Mutant("one draw number for cousins", TOKEN, _drawn([0, 0, 1, 2], numbers=[1, 2, 3, 3])),
]
