"""Drafters of trees as programs, and every draft that they may draw from tables of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from tandem.speculation.proposal import Proposal
from tests.support.laws.laws import in_each_other


@dataclass(frozen=True, eq=False)
class Models:
    """Context-dependent rows of a target and of drafters over every prefix up to a length.

    A prefix is a number, as in `Tables`: with R roots, prefix x has the number V * prefix + x + R.
    """

    vocab_size: int
    p: Tensor
    drafters: Sequence[Tensor]
    roots: int = 1

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

    @classmethod
    def of_seeds(cls, longest: int, seeds: Sequence[int], *, drafters: int = 1) -> Models:
        """Random models in each other; those of even seeds have zeros."""
        each = [cls.random(longest, seed, zeros=seed % 2 == 0, drafters=drafters) for seed in seeds]
        size = each[0].vocab_size
        p, *q = (
            in_each_other(size, rows)
            for rows in zip(*([one.p, *one.drafters] for one in each), strict=True)
        )
        return cls(size, p, q, len(seeds))

    def extend(self, prefix: int, token: int) -> int:
        return prefix * self.vocab_size + token + self.roots

    def root(self, prefix: int) -> int:
        while prefix >= self.roots:
            prefix = (prefix - self.roots) // self.vocab_size
        return prefix

    def law(self, length: int) -> Tensor:
        """[R * V ** length] probabilities of each sequence under p alone, root by root."""
        prefixes, law = torch.arange(self.roots), torch.ones(self.roots, dtype=torch.float64)
        for _ in range(length):
            law = (law[:, None] * self.p[prefixes]).flatten()
            tokens = torch.arange(self.vocab_size)
            prefixes = (prefixes[:, None] * self.vocab_size + tokens + self.roots).flatten()
        return law

    @cached_property
    def lists(self) -> list[list[list[float]]]:
        return [table.tolist() for table in self.drafters]


@dataclass(frozen=True)
class Node:
    """One drafted token.

    Attributes:
        place: that it hangs at.
        drafter: whose row it was drawn from; None for a certain one.
        token: the drawn token.
        likeliest: whether it was not drawn but is its row's likeliest token: a lie.
        number: nodes with equal numbers are drawn by one random number: a lie, unless None.
    """

    place: int
    drafter: int | None
    token: int = -1
    likeliest: bool = False
    number: int | None = None


@dataclass(frozen=True, eq=False)
class Program:
    """A drafter: what it draws next, given all that it has drawn in the round.

    Attributes:
        name: for people.
        next: gives the next node, with a token only if it is certain; None ends the draft.
        distinct: whether siblings are drawn without replacement.
        claims: the value of `distinct` that is sent, if that is a lie.
        edit: changes a whole draft after it was drawn: a lie. It gets the nodes and their rows,
            and returns the indices of the nodes to send. It may only drop or move leaves, so that
            no place is lost.
        each: the program of each root, in place of this one; their `distinct` is this one's.
    """

    name: str
    next: Callable[[Sequence[Node]], Node | None]
    distinct: bool = False
    claims: bool | None = None
    edit: Callable[[Sequence[Node], Sequence[list[float]]], Sequence[int]] | None = None
    each: Sequence[Program] = ()

    @classmethod
    def of_roots(cls, name: str, each: Sequence[Program]) -> Program:
        """Several programs at once, each in the models of its own root."""
        (distinct,) = {program.distinct for program in each}
        return cls(name, lambda _: None, distinct, each=each)

    def at(self, models: Models, prefix: int) -> Program:
        """The program that draws after a prefix."""
        return self.each[models.root(prefix)] if self.each else self

    @property
    def said(self) -> bool:
        return self.distinct if self.claims is None else self.claims


@dataclass(frozen=True)
class Drawn:
    """A possible draft: its nodes, their rows, and its probability after its prefix."""

    nodes: list[Node]
    rows: list[list[float]]
    weight: float


def drawings(program: Program, models: Models, prefix: int) -> list[Drawn]:
    """Every draft that a program may draw after a prefix."""
    found: list[Drawn] = []

    def end(nodes: list[Node], rows: list[list[float]], weight: float) -> None:
        if program.edit is not None:
            sent = program.edit(nodes, rows)
            nodes, rows = [nodes[i] for i in sent], [rows[i] for i in sent]
        found.append(Drawn(nodes, rows, weight))

    def go_on(
        nodes: list[Node],
        rows: list[list[float]],
        behind: list[int],
        weight: float,
        numbers: dict[int, tuple[float, float]],
    ) -> None:
        wanted = program.next(nodes)
        if wanted is None:
            end(nodes, rows, weight)
            return
        at = behind[wanted.place]
        row = law = _row(models, wanted, at)
        if program.distinct:
            siblings = {node.token for node in nodes if node.place == wanted.place}
            law = [0.0 if x in siblings else q for x, q in enumerate(row)]
            total = sum(law)
            if total <= 0:  # nothing is left to draw, so the draft ends here
                end(nodes, rows, weight)
                return
            law = [q / total for q in law]
        if wanted.likeliest:
            law = [float(x == row.index(max(row))) for x in range(len(row))]
        low, high = numbers.get(wanted.number or 0, (0.0, 1.0)) if wanted.number else (0.0, 1.0)
        reached = 0.0
        for token, q in enumerate(law):
            # If one number draws several nodes: the interval that it may still be in.
            part = max(low, reached), min(high, reached + q)
            reached += q
            chance = (part[1] - part[0]) / (high - low)
            if chance > 1e-15:
                kept = numbers if wanted.number is None else {**numbers, wanted.number: part}
                after = [*behind, models.extend(at, token)]
                node = Node(wanted.place, wanted.drafter, token, wanted.likeliest, wanted.number)
                go_on([*nodes, node], [*rows, row], after, weight * chance, kept)

    go_on([], [], [prefix], 1.0, {})
    return found


def _row(models: Models, wanted: Node, at: int) -> list[float]:
    if wanted.drafter is None:
        return [float(x == wanted.token) for x in range(models.vocab_size)]
    return models.lists[wanted.drafter][at]


@dataclass(frozen=True)
class Batch:
    """All drafts after some prefixes.

    Attributes:
        proposal: the drafts, each node with its own row.
        weight: [B], probability of each draft after its prefix.
        start: [B], index of its prefix.
        prefixes: [B, N+1], the prefix at each place.
    """

    proposal: Proposal
    weight: Tensor
    start: Tensor
    prefixes: Tensor


@lru_cache(maxsize=16)  # several rules decide the same drafts
def batch_of(program: Program, models: Models, prefixes: tuple[int, ...]) -> Batch:
    """Every draft that a program may draw after each of the prefixes."""
    drafts, start = [], []
    for index, prefix in enumerate(prefixes):
        behind = drawings(program.at(models, prefix), models, prefix)
        drafts += behind
        start += [index] * len(behind)
    most = max(len(draft.nodes) for draft in drafts)
    tokens = np.zeros((len(drafts), most), np.int64)
    rows = np.zeros((len(drafts), most, models.vocab_size))
    for b, draft in enumerate(drafts):
        count = len(draft.nodes)
        if count:
            tokens[b, :count] = [node.token for node in draft.nodes]
            rows[b, :count] = draft.rows
    proposal = Proposal.from_dense(
        torch.from_numpy(tokens),
        torch.from_numpy(rows),
        torch.tensor([len(draft.nodes) for draft in drafts]),
        [[node.place for node in draft.nodes] for draft in drafts],
        distinct=program.said,
    )
    starts = torch.tensor(start)
    places = grown(proposal, torch.tensor(prefixes)[starts], models, most)
    weight = torch.tensor([draft.weight for draft in drafts], dtype=torch.float64)
    return Batch(proposal, weight, starts, places)


def grown(proposal: Proposal, prefix: Tensor, models: Models, left: int) -> Tensor:
    """[B, N+1]: the prefix at each place, with at most `left` tokens more than `prefix` [B]."""
    assert proposal.branches is not None
    tree = proposal.branches.tree
    found = torch.zeros_like(tree.depth)
    found[:, 0] = prefix
    for i in range(tree.parents.shape[1]):
        place = tree.parents[:, [i]]
        before = found.gather(1, place)
        after = before * models.vocab_size + proposal.tokens[:, [i]] + models.roots
        grown = torch.where(tree.depth.gather(1, place) < left, after, before)
        found[:, [i + 1]] = torch.where(proposal.lengths[:, None] > i, grown, 0)
    return found
