"""The compiled kernels for trees and independent chains, compared with their rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.answers import Decision, ScoredRows
from tandem.engine.asks import Decide
from tandem.engine.numbers import decisions
from tandem.engine.numbers.decisions import decide, decisions_of
from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.speculation.randomness import VerdictNumbers
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftShape
from tandem.verification import VERIFIERS
from tandem.verification.kernels.chains import decide_trees
from tandem.verification.kernels.trees import decide_block_tree, decide_token_tree
from tandem.verification.token import TokenVerifier
from tests.unit.verification.test_kernels import ALMOST_ONE, received, rows_of

FUSED = [name for name, rule in VERIFIERS.items() if rule.tree_kernel is not None]
_Rng = np.random.Generator


def tree_of(rng: _Rng, nodes: int, vocab_size: int) -> Draft:
    """Of any shape; some siblings share a row, some rows are certain, some nodes are twins."""
    distinct = bool(rng.random() < 0.5)
    tokens: list[int] = []
    parents: list[int] = []
    row_of: list[int] = []
    rows: list[tuple[Any, Any]] = []
    twins: set[int] = set()
    while len(tokens) < nodes:
        free = [place for place in range(len(tokens) + 1) if place not in twins]
        place = int(rng.choice(free))
        siblings = [i for i, parent in enumerate(parents) if parent == place]
        taken = {tokens[i] for i in siblings}
        shared = [row_of[i] for i in siblings if len(rows[row_of[i]][0])]
        if shared and rng.random() < 0.7:
            row = shared[0]
        else:
            size = 0 if rng.random() < 0.2 else int(rng.integers(1, vocab_size + 1))
            ids = rng.permutation(vocab_size)[:size].astype(np.uint32)
            rows.append((ids, rng.integers(1, 65536, size).astype(np.uint16)))
            row = len(rows) - 1
        ids = rows[row][0]
        choices = ids.tolist() if len(ids) else list(range(vocab_size))
        choices = [token for token in choices if not (distinct and token in taken)]
        if not choices:
            if row not in row_of:
                rows.pop()
            continue
        tokens.append(int(rng.choice(choices)))
        parents.append(place)
        row_of.append(row)
        if tokens[-1] in taken:
            twins.add(len(tokens))
    ids = np.concatenate([np.empty(0, np.uint32), *(ids for ids, _ in rows)])
    weights = np.concatenate([np.empty(0, np.uint16), *(own for _, own in rows)])
    sizes = [len(ids) for ids, _ in rows]
    draft = Draft(tokens, sizes, ids, weights, parents, row_of, distinct)
    assert not draft.fault_of_nodes()
    return draft


def chains_of(rng: _Rng, nodes: int, vocab_size: int) -> Draft:
    """Independent chains, merged; some rows are certain, some have ties; many draws are twins."""
    chains = int(rng.choice([n for n in range(1, nodes + 1) if nodes % n == 0]))
    tokens: list[int] = []
    parents: list[int] = []
    row_of: list[int] = []
    ids, weights = [np.empty(0, np.uint32)], [np.empty(0, np.uint16)]
    reached = [0] * chains  # by each chain
    for _ in range(nodes // chains):
        home: dict[tuple[int, int], int] = {}
        for place in sorted(set(reached)):
            size = 0 if rng.random() < 0.2 else int(rng.integers(1, vocab_size + 1))
            row = rng.permutation(vocab_size)[: max(size, 1)]
            ids.append(row[:size].astype(np.uint32))
            weights.append(rng.integers(1, rng.choice([3, 65536]), size).astype(np.uint16))
            for _ in range(reached.count(place)):
                tokens.append(int(rng.choice(row)))
                parents.append(place)
                row_of.append(len(ids) - 2)
                home.setdefault((place, tokens[-1]), len(tokens))
        new = range(len(tokens) - chains, len(tokens))
        reached = [home[parents[node], tokens[node]] for node in new]
    sizes = [len(own) for own in ids[1:]]
    draft = Draft(tokens, sizes, np.concatenate(ids), np.concatenate(weights), parents, row_of)
    assert not draft.fault_of_nodes()
    assert not draft.misfit(DraftShape.IID_CHAINS)
    return draft


def draft_for(rng: _Rng, name: str, nodes: int, vocab_size: int) -> Draft:
    """Of the widest kind that a rule takes."""
    of = tree_of if VERIFIERS[name].takes is DraftShape.TREE else chains_of
    return of(rng, nodes, vocab_size)


def cases(rng: _Rng, name: str, count: int) -> Any:
    """Drafts, and rows of p that resemble theirs more or less: wrong residuals differ then."""
    for _ in range(count):
        vocab_size, nodes = int(rng.integers(3, 9)), int(rng.integers(1, 9))
        draft = draft_for(rng, name, nodes, vocab_size)
        rows, likeness = draft.row_of_places(), rng.choice([0.0, 0.5])
        # With zeros, a mixture has ratios that float32 and float64 rank differently.
        p = rows_of(rng, max(rows) + 1, vocab_size, 0.0 if likeness else 0.3)
        q = Proposal.from_drafts([draft]).dense(vocab_size, torch.float32)[0].numpy()
        for place, row in zip(draft.places(), draft.rows_of_nodes(), strict=True):
            p[rows[place]] += likeness * (q[row] - p[rows[place]])
        yield p, draft


def all_of(name: str, p: Any, draft: Draft, numbers: Any) -> Any:
    """The verdicts of one draft for each row of numbers."""
    kernel, count = VERIFIERS[name].tree_kernel, len(numbers)
    assert kernel is not None
    out = decide_trees(kernel, p, [0] * count, [received_tree(draft)] * count, np.asarray(numbers))
    assert np.isfinite(out[:, 2]).all()
    return out


def fused(name: str, p: Any, draft: Draft, numbers: Any) -> tuple[int, int, Any]:
    (out,) = all_of(name, p, draft, np.asarray(numbers)[None])
    return int(out[0]), int(out[1]), out[3 : 3 + len(draft)]


def received_tree(draft: Draft) -> Draft:
    flat = received(draft)
    return Draft(
        flat.token_ids,
        flat.sizes,
        flat.ids,
        flat.weights,
        draft.parents,
        draft.row_of,
        draft.distinct,
    )


def target_of(p: Any, draft: Draft) -> torch.Tensor:
    return torch.from_numpy(p)[list(draft.row_of_places())][None].double()


@pytest.mark.parametrize("name", FUSED)
def test_it_keeps_with_the_rules_own_probabilities(rng: _Rng, name: str) -> None:
    """Just below and just above each h, and whatever the other numbers make of it."""
    rule, differing = VERIFIERS[name], 0
    for p, draft in cases(rng, name, 80):
        count, target = len(draft), target_of(p, draft)
        asked, wanted = [np.ones(count + 1) * 0.5], []
        proposal = Proposal.from_drafts([draft])
        chances = rule.accept_probabilities(proposal, target)[0].numpy()
        for node in range(count):
            places = []
            for distance in (-1e-5, 1e-5):
                numbers = rng.random(count + 1)
                numbers[node] = np.clip(chances[node] + distance, 0, ALMOST_ONE)
                if not (np.abs(numbers[:-1] - chances) > 1e-6).all():
                    continue
                passed = torch.from_numpy(numbers[:-1] < chances)[None]
                places.append(int(rule.stop(proposal, passed)[0]))
                asked.append(numbers)
            wanted += places
            differing += len(set(places)) > 1
        out = all_of(name, p, draft, asked)
        assert out[1:, 0].tolist() == wanted
        np.testing.assert_allclose(
            out[0, 3 : 3 + count], proposal.overlaps(target)[0].numpy(), atol=1e-6
        )
    assert differing > 30


@pytest.mark.parametrize("name", FUSED)
def test_what_follows_has_the_law_of_the_residual(rng: _Rng, name: str) -> None:
    """Over a fine grid of the last number, at every place that occurs."""
    rule, grid, kept = VERIFIERS[name], (np.arange(400) + 0.5) / 400, set()
    for p, draft in cases(rng, name, 100):
        accepting = rng.random(len(draft))
        numbers = [[*accepting, last] for last in (*grid, 0.0, ALMOST_ONE)]
        out = all_of(name, p, draft, numbers).astype(int)
        (place,), tokens = set(out[:, 0].tolist()), out[:, 1]
        kept.add(place)
        weights = rule.residual_weights(
            Proposal.from_drafts([draft]), target_of(p, draft), torch.tensor([place])
        )[0].numpy()
        found = np.bincount(tokens[: len(grid)], minlength=p.shape[1]) / len(grid)
        np.testing.assert_allclose(found, weights / weights.sum(), atol=2.1 / len(grid))
        for token in tokens[len(grid) :]:
            assert p[draft.row_of_places()[place], token] > 0
    assert len(kept) > 3


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("block", decide_token_tree), ("spectr", decide_block_tree), ("gbv", decide_block_tree)],
)
def test_a_wrong_rule_is_caught(
    rng: _Rng, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(VERIFIERS[name]), "fused_tree", staticmethod(wrong))
    with pytest.raises(AssertionError):
        test_it_keeps_with_the_rules_own_probabilities(rng, name)
    with pytest.raises(AssertionError):
        test_what_follows_has_the_law_of_the_residual(rng, name)


def test_every_rule_for_more_than_chains_has_a_kernel() -> None:
    wider = [name for name, rule in VERIFIERS.items() if rule.takes is not DraftShape.CHAIN]
    assert wider == FUSED


def test_a_rule_made_of_another_has_not_its_kernel() -> None:
    class Changed(TokenVerifier):
        """Decides otherwise, perhaps."""

    assert TokenVerifier().tree_kernel is not None
    assert Changed().tree_kernel is None


@pytest.mark.parametrize("name", FUSED)
def test_a_row_that_is_no_number_is_noticed(rng: _Rng, name: str) -> None:
    """And whoever shares its call does not notice."""
    kernel = VERIFIERS[name].tree_kernel
    assert kernel is not None
    drafts = [draft_for(rng, name, 4, 6), draft_for(rng, name, 6, 6)]
    counts = [max(draft.row_of_places()) + 1 for draft in drafts]
    sound, numbers = rows_of(rng, sum(counts), 6, 0.0), rng.random((2, 7))
    starts = [0, counts[0]]
    expected = decide_trees(kernel, sound, starts, drafts, numbers)
    for broken in range(counts[0]):
        p = sound.copy()
        p[broken] = np.nan
        first, second = decide_trees(kernel, p, starts, drafts, numbers)
        assert not np.isfinite(first[2])
        assert 0 <= first[0] <= 4
        assert 0 <= first[1] < 6
        np.testing.assert_array_equal(second, expected[1])


@pytest.mark.parametrize("name", FUSED)
def test_the_engine_decides_alike_with_and_without(
    rng: _Rng, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, vocab_size = VERIFIERS[name], 40
    drafts = [draft_for(rng, name, nodes, vocab_size) for nodes in (5, 7, 2, 16, 4)]
    counts = [max(draft.row_of_places()) + 1 for draft in drafts]
    logits = torch.from_numpy(rng.normal(size=(sum(counts), vocab_size)).astype(np.float32))

    def verdicts(round_: int) -> list[Any]:
        first, asks = 0, []
        for seed, (draft, count) in enumerate(zip(drafts, counts, strict=True)):
            numbers = VerdictNumbers.of(seed)
            scored = ScoredRows(logits, first, count)
            first += count
            sampling = Sampling(temperature=0.9, top_k=30, seed=seed)
            asks.append(Decide(rule, draft, scored, sampling, None, numbers, round_))
        answers: Any = decide(asks)
        return [one for one in decisions_of(answers) if isinstance(one, Decision)]

    calls = 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return decide_trees(*arguments)

    monkeypatch.setattr(decisions, "decide_trees", counted)
    compiled = [verdict for round_ in range(25) for verdict in verdicts(round_)]
    assert calls >= 25
    monkeypatch.setattr(type(rule), "fused_tree", None)
    plain = [verdict for round_ in range(25) for verdict in verdicts(round_)]
    assert len({one.place for one in compiled}) > 3
    for one, other in zip(compiled, plain, strict=True):
        assert (one.place, one.next_token) == (other.place, other.next_token)
        assert one.num_accepted == other.num_accepted
        np.testing.assert_allclose(one.overlaps, other.overlaps, atol=1e-5)
