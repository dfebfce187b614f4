"""Exact laws of rounds whose drafts are trees: programs that draw them, and an enumerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from target_svc.verifiers import Verifier


@dataclass(frozen=True)
class Models:
    """Context-dependent rows of a target and of drafters over every prefix up to a length.

    A prefix is a number: () is 0, and prefix x has the number V * prefix + x + 1.
    """

    vocab_size: int
    p: Tensor
    drafters: Sequence[Tensor]

    @classmethod
    def random(
        cls, longest: int, seed: int, *, zeros: bool, drafters: int = 1, vocab_size: int = 3
    ) -> Models:
        generator = torch.Generator().manual_seed(seed)
        count = sum(vocab_size**n for n in range(longest + 1))
        tables = []
        for _ in range(1 + drafters):
            rows = torch.rand(count, vocab_size, generator=generator, dtype=torch.float64) ** 2
            if zeros:
                dropped = torch.rand(rows.shape, generator=generator) < 0.3
                keep = torch.randint(vocab_size, (count, 1), generator=generator)
                rows = rows.masked_fill(dropped.scatter(1, keep, False), 0.0)
            tables.append(rows / rows.sum(-1, keepdim=True))
        return cls(vocab_size, tables[0], tables[1:])

    def extend(self, prefix: int, token: int) -> int:
        return prefix * self.vocab_size + token + 1

    def law(self, length: int) -> Tensor:
        """[V ** length] probabilities of each sequence under p alone."""
        prefixes, law = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
        for _ in range(length):
            law = (law[:, None] * self.p[prefixes]).flatten()
            tokens = torch.arange(self.vocab_size)
            prefixes = (prefixes[:, None] * self.vocab_size + tokens + 1).flatten()
        return law

    @cached_property
    def lists(self) -> list[list[list[float]]]:
        return [table.tolist() for table in self.drafters]


@dataclass(frozen=True)
class Node:
    """One drafted token: where it hangs, and who drew it; a certain one was chosen by nobody."""

    place: int
    drafter: int | None
    token: int = -1


@dataclass(frozen=True)
class Program:
    """A drafter: what it draws next, given all that it has drawn in the round.

    Attributes:
        name: for people.
        next: the next node, its token only where it is certain; None ends the draft.
        distinct: whether siblings are drawn without replacement, and said to be.
        claims: what is said of that, where it is a lie.
    """

    name: str
    next: Callable[[Sequence[Node]], Node | None]
    distinct: bool = False
    claims: bool | None = None

    @property
    def said(self) -> bool:
        return self.distinct if self.claims is None else self.claims


@dataclass
class Drawn:
    """A draft that may come out: its nodes, their rows, the chance of it behind its prefix."""

    nodes: list[Node]
    rows: list[list[float]]
    weight: float


def drawings(program: Program, models: Models, prefix: int) -> list[Drawn]:
    """Every draft that a program may draw behind a prefix."""
    found: list[Drawn] = []

    def go_on(nodes: list[Node], rows: list[list[float]], behind: list[int], weight: float) -> None:
        wanted = program.next(nodes)
        if wanted is None:
            found.append(Drawn(nodes, rows, weight))
            return
        at = behind[wanted.place]
        if wanted.drafter is None:
            row = [float(x == wanted.token) for x in range(models.vocab_size)]
        else:
            row = models.lists[wanted.drafter][at]
        law = row
        if program.distinct:
            siblings = {node.token for node in nodes if node.place == wanted.place}
            law = [0.0 if x in siblings else q for x, q in enumerate(row)]
            total = sum(law)
            if total <= 0:  # nothing is left to draw: the draft ends before
                found.append(Drawn(nodes, rows, weight))
                return
            law = [q / total for q in law]
        for token, q in enumerate(law):
            if q > 0:
                node = Node(wanted.place, wanted.drafter, token)
                after = [*behind, models.extend(at, token)]
                go_on([*nodes, node], [*rows, row], after, weight * q)

    go_on([], [], [prefix], 1.0)
    return found


def proposal_of(drafts: Sequence[Drawn], vocab_size: int, distinct: bool) -> Proposal:
    """A batch of them, each node with its own row."""
    most = max(len(draft.nodes) for draft in drafts)
    tokens = torch.zeros(len(drafts), most, dtype=torch.int64)
    rows = torch.zeros(len(drafts), most, vocab_size, dtype=torch.float64)
    for b, draft in enumerate(drafts):
        count = len(draft.nodes)
        if count:
            tokens[b, :count] = torch.tensor([node.token for node in draft.nodes])
            rows[b, :count] = torch.tensor(draft.rows, dtype=torch.float64)
    return Proposal.from_dense(
        tokens,
        rows,
        torch.tensor([len(draft.nodes) for draft in drafts]),
        [[node.place for node in draft.nodes] for draft in drafts],
        distinct=distinct,
    )


def stops(rule: Verifier[Any], proposal: Proposal, h: Tensor) -> Tensor:
    """[B, N+1]: law of the place that is kept, from the nodes' chances [B, N] to pass."""
    law = h.new_zeros(h.shape[0], h.shape[1] + 1)
    for pattern in product((False, True), repeat=h.shape[1]):
        passed = torch.tensor(pattern, dtype=torch.bool).expand(h.shape)
        weight = torch.where(passed, h, 1 - h).prod(-1)
        law.scatter_add_(1, rule.stop(proposal, passed)[:, None], weight[:, None])
    return law


def round_law(
    rule: Verifier[Any], program: Program, models: Models, length: int
) -> tuple[Tensor, float]:
    """[V ** length]: exact law of the first `length` tokens of rounds of a program's drafts.

    Integrates the uniforms out through `accept_probabilities`, `stop` and `residual_weights`,
    as many rounds as the tokens need.

    Returns:
        The law, and the mean number of tokens that the first round keeps.
    """
    size, kept = models.vocab_size, 0.0
    offset = sum(size**n for n in range(length))
    law = torch.zeros(size**length, dtype=torch.float64)
    pending: dict[int, dict[int, float]] = {n: {} for n in range(length)}
    pending[0][0] = 1.0
    for emitted in range(length):
        drafts, starts = [], []
        for prefix, mass in pending[emitted].items():
            for draft in drawings(program, models, prefix):
                drafts.append(Drawn(draft.nodes, draft.rows, draft.weight * mass))
                starts.append(prefix)
        if not drafts:
            continue
        proposal = proposal_of(drafts, size, program.said)
        prefixes, cut, depths = _places(proposal, starts, size, length - emitted)
        target_probs = models.p[prefixes]
        weight = torch.tensor([draft.weight for draft in drafts], dtype=torch.float64)
        chances = stops(rule, proposal, rule.accept_probabilities(proposal, target_probs))
        if not emitted:
            kept = float((weight[:, None] * chances * depths).sum())
        for place in range(chances.shape[1]):
            at = torch.full((len(drafts),), place)
            residual = rule.residual_weights(proposal, target_probs, at)
            after = (
                (weight * chances[:, place])[:, None] * residual / residual.sum(-1, keepdim=True)
            )
            live = chances[:, place] > 0  # a shorter draft has no such place
            after, depth, ends = after[live], depths[live, place], cut[live, place]
            over = emitted + depth + 1 >= length
            for token in range(size):
                last = torch.where(emitted + depth >= length, ends, ends * size + token + 1)
                law.index_add_(0, last[over] - offset, after[over, token])
                going = ~over & (after[:, token] > 0)
                rounds = zip(
                    (emitted + depth[going] + 1).tolist(),
                    last[going].tolist(),
                    after[going, token].tolist(),
                    strict=True,
                )
                for reached, state, mass in rounds:
                    pending[reached][state] = pending[reached].get(state, 0.0) + mass
    return law, kept


def _places(
    proposal: Proposal, starts: Sequence[int], size: int, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, N+1] of each place: its prefix, its prefix cut to the tokens left, and its depth."""
    assert proposal.branches is not None
    parents, depth = proposal.branches.tree.parents, proposal.branches.tree.depth
    prefixes = torch.zeros_like(depth)
    prefixes[:, 0] = torch.tensor(starts)
    cut = prefixes.clone()
    for i in range(parents.shape[1]):
        place, token = parents[:, i : i + 1], proposal.tokens[:, i : i + 1]
        there = (torch.arange(1) + i < proposal.lengths[:, None])[:, 0]
        grown = (prefixes.gather(1, place) * size + token + 1)[:, 0]
        prefixes[:, i + 1] = torch.where(there, grown, 0)
        before = cut.gather(1, place)[:, 0]
        full = depth.gather(1, place)[:, 0] >= left
        cut[:, i + 1] = torch.where(full, before, before * size + token[:, 0] + 1)
    return prefixes, cut, depth
