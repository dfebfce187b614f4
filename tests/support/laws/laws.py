"""Exact laws of small models: tables, an enumeration of whole decodings, a chi-square test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from tandem.speculation.proposal import Proposal, Verdict
from tandem.verification import Verifier


@dataclass(frozen=True)
class Tables:
    """Context-dependent target p and drafter q over every prefix up to a length.

    A prefix is a number: () is 0, and prefix x has the number V * prefix + x + 1. Several tables
    may lie in each other, so that their laws are computed at once: R tables have the roots 0 to
    R - 1, and prefix x has the number V * prefix + x + R.
    """

    vocab_size: int
    p: Tensor
    q: Tensor
    roots: int = field(default=1, kw_only=True)

    @classmethod
    def random(cls, vocab_size: int, longest: int, seed: int, zeros: bool) -> Tables:
        generator = torch.Generator().manual_seed(seed)
        count = sum(vocab_size**n for n in range(longest + 1))
        tables = []
        for _ in range(2):
            rows = torch.rand(count, vocab_size, generator=generator, dtype=torch.float64) ** 2
            if zeros:
                dropped = torch.rand(rows.shape, generator=generator) < 0.3
                keep = torch.randint(vocab_size, (count, 1), generator=generator)
                rows = rows.masked_fill(dropped.scatter(1, keep, False), 0.0)
            tables.append(rows / rows.sum(-1, keepdim=True))
        return cls(vocab_size, *tables)

    @classmethod
    def of_seeds(cls, vocab_size: int, longest: int, seeds: Sequence[int]) -> Tables:
        """Random tables in each other; those of even seeds have zeros."""
        each = [cls.random(vocab_size, longest, seed, zeros=seed % 2 == 0) for seed in seeds]
        p = in_each_other(vocab_size, [one.p for one in each])
        q = in_each_other(vocab_size, [one.q for one in each])
        return cls(vocab_size, p, q, roots=len(seeds))

    def extend(self, prefix: Tensor, token: Tensor | int) -> Tensor:
        return prefix * self.vocab_size + token + self.roots

    def autoregressive_law(self, length: int) -> Tensor:
        """[R * V ** length] probabilities of each sequence under p alone, root by root."""
        prefixes, law = torch.arange(self.roots), torch.ones(self.roots, dtype=torch.float64)
        for _ in range(length):
            law = (law[:, None] * self.p[prefixes]).flatten()
            tokens = torch.arange(self.vocab_size)
            prefixes = self.extend(prefixes[:, None], tokens).flatten()
        return law

    def block(self, prefixes: Tensor, drafts: Tensor) -> tuple[Proposal, Tensor, Tensor]:
        """Proposal, target rows and draft probability of `drafts` [B, G] after `prefixes`."""
        p, q, weight = [self.p[prefixes]], [], torch.ones(len(prefixes), dtype=torch.float64)
        for i in range(drafts.shape[1]):
            q.append(self.q[prefixes])
            weight = weight * q[-1].gather(1, drafts[:, [i]])[:, 0]
            prefixes = self.extend(prefixes, drafts[:, i])
            p.append(self.p[prefixes])
        return Proposal.from_dense(drafts, torch.stack(q, 1)), torch.stack(p, 1), weight


def in_each_other(vocab_size: int, tables: Sequence[Tensor]) -> Tensor:
    """Rows of all prefixes of several tables, length by length, as `Tables` counts them."""
    first, size, levels = 0, 1, []
    while first < len(tables[0]):
        levels += [rows[first : first + size] for rows in tables]
        first, size = first + size, size * vocab_size
    return torch.cat(levels)


def accepted_law(rule: Verifier[Any], h: Tensor) -> Tensor:
    """[B, G+1]: law of the number of kept tokens, from the probabilities h of the rows [B, G]."""
    law = h.new_zeros(h.shape[0], h.shape[1] + 1)
    for pattern in product((False, True), repeat=h.shape[1]):
        passed = torch.tensor(pattern)
        weight = torch.where(passed, h, 1 - h).prod(-1)
        law[:, int(rule.count_accepted(passed[None])[0])] += weight
    return law


def speculative_law(
    rule: Verifier[Any], tables: Tables, full_gamma: int, length: int, *, capped: bool = False
) -> Tensor:
    """[R * V ** length]: exact law of the first `length` tokens of rounds of `full_gamma` drafts.

    Integrates the uniforms out through `accept_probabilities` and `residual_weights`, and
    carries a rule's state along every path. `capped` drafts no more than `length` leaves, as
    greedy_block does at the end of max_new_tokens.
    """
    vocab_size = tables.vocab_size
    offset = tables.roots * sum(vocab_size**n for n in range(length))
    law = torch.zeros(tables.roots * vocab_size**length, dtype=torch.float64)
    pending: dict[int, list[tuple[int, float, object]]] = {
        0: [(root, 1.0, None) for root in range(tables.roots)]
    }
    for emitted in range(length):
        states = _merge(pending.pop(emitted, []))
        if not states:
            continue
        gamma = min(full_gamma, length - emitted) if capped else full_gamma
        all_drafts = torch.tensor(list(product(range(vocab_size), repeat=gamma)))
        prefixes = torch.tensor([s[0] for s in states]).repeat_interleave(len(all_drafts))
        mass = torch.tensor([s[1] for s in states], dtype=torch.float64)
        carry = [s[2] for s in states for _ in range(len(all_drafts))]
        drafts = all_drafts.repeat(len(states), 1)
        proposal, target_probs, weight = tables.block(prefixes, drafts)
        weight = weight * mass.repeat_interleave(len(all_drafts))
        kept_law = accepted_law(rule, rule.accept_probabilities(proposal, target_probs, carry))
        for kept in range(gamma + 1):
            place = torch.full((len(drafts),), kept)
            residual = rule.residual_weights(proposal, target_probs, place, carry)
            after = weight[:, None] * kept_law[:, [kept]]
            after = after * residual / residual.sum(-1, keepdim=True)
            # Drafts that share the kept tokens lead to the same state.
            shared = vocab_size ** (gamma - kept)
            after = after.reshape(-1, shared, vocab_size).sum(1)
            first = torch.arange(0, len(drafts), shared)
            for token in range(vocab_size):
                path = [drafts[first, i] for i in range(kept)] + [torch.full_like(first, token)]
                prefix, reached = prefixes[first], emitted
                for step in path[: length - emitted]:
                    prefix, reached = tables.extend(prefix, step), reached + 1
                if reached == length:
                    law.index_add_(0, prefix - offset, after[:, token])
                    continue
                live = first[after[:, token] > 0]
                if not len(live):
                    continue
                carried = [carry[b] for b in live.tolist()]
                verdict = Verdict(place[live], place[live], torch.full_like(live, token), carried)
                part = Proposal.from_dense(proposal.tokens[live], proposal.probs[live])
                carries = rule.next_carry(part, target_probs[live], verdict)
                masses = after[after[:, token] > 0, token].tolist()
                numbers = prefix[after[:, token] > 0].tolist()
                pending.setdefault(reached, []).extend(zip(numbers, masses, carries, strict=True))
    return law


def _merge(states: list[tuple[int, float, object]]) -> list[tuple[int, float, object]]:
    """Merge states without a carry into one state per prefix."""
    merged: dict[int, float] = {}
    for prefix, mass, carry in states:
        if carry is None:
            merged[prefix] = merged.get(prefix, 0.0) + mass
    kept = [state for state in states if state[2] is not None]
    return [(prefix, mass, None) for prefix, mass in merged.items()] + kept


def expected_accepted(rule: Verifier[Any], tables: Tables, gamma: int, prefix: int = 0) -> float:
    """Exact mean number of kept tokens of one round after a prefix."""
    drafts = torch.tensor(list(product(range(tables.vocab_size), repeat=gamma)))
    prefixes = torch.full((len(drafts),), prefix)
    proposal, target_probs, weight = tables.block(prefixes, drafts)
    h = rule.accept_probabilities(proposal, target_probs, [None] * len(drafts))
    kept = accepted_law(rule, h) @ torch.arange(gamma + 1, dtype=torch.float64)
    return float(weight @ kept)


def chi_square_p_value(counts: np.ndarray, law: np.ndarray, smallest: float = 5.0) -> float:
    """p-value of observed counts against an exact law; cells of expectation < 5 are merged."""
    expected = law * counts.sum()
    if counts[law == 0].any():
        return 0.0
    order = np.argsort(expected)
    expected, counts = expected[order], counts[order]
    merged = int(np.searchsorted(np.cumsum(expected) >= smallest, True)) + 1
    large = max(merged, int(np.searchsorted(expected, smallest)))
    observed = np.concatenate(([counts[:large].sum()], counts[large:]))
    expectation = np.concatenate(([expected[:large].sum()], expected[large:]))
    statistic = float(((observed - expectation) ** 2 / expectation).sum())
    return float(stats.chi2.sf(statistic, len(observed) - 1))
