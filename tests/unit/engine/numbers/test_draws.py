"""Draws of the engine: after several rows, and without the siblings drawn at the same position."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from tandem.engine.asks import Draw, ReadTokens, ToHost, Truncation
from tandem.engine.numbers.draws import draw
from tandem.engine.numbers.home import drafts_of, joined, parted, tokens_of
from tandem.inference.feed import DrawnToken, Draws, Feed
from tandem.speculation import randomness
from tandem.speculation.categorical import Categorical
from tandem.speculation.randomness import Purpose, RandomNumbers, digits
from tandem.speculation.request.sampling import Sampling
from tests.support.laws.laws import chi_square_p_value

LAW = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
TEXTS = 3_000


@pytest.fixture(autouse=True)
def _numbers_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are drawn in one round: numbers of later ones would take most of the time."""
    monkeypatch.setattr(randomness, "_MOST_ROUNDS", 1)


def told(*token_ids: int) -> list[DrawnToken]:
    """Draws of others."""
    tokens = torch.tensor(token_ids)
    draws = Draws(tokens, Categorical(tokens[:, None], torch.ones(len(tokens), 1).long()))
    return [DrawnToken(draws, i) for i in range(len(token_ids))]


def ask(
    seed: int, counts: list[int], earlier: list[DrawnToken], sampling: Sampling, support: int = 0
) -> Draw:
    return Draw(
        None,  # type: ignore[arg-type]
        Feed(None, [0] * len(counts), len(counts)),  # type: ignore[arg-type]
        sampling,
        Truncation(1.0, support),
        len(LAW),
        RandomNumbers(seed, Purpose.DRAFT, digits),
        1,
        0,
        8,
        counts,
        distinct=True,
        earlier=earlier,
    )


def tokens(asks: list[Draw], rows: int = 1) -> list[list[int]]:
    logits = torch.tensor(LAW, dtype=torch.float32).log().expand(len(asks) * rows, -1).clone()
    drawn = draw(asks, logits, [i * rows for i in range(len(asks))])
    return tokens_of([ReadTokens(one) for one in drawn])


@pytest.mark.parametrize("support", [0, 5])
@pytest.mark.parametrize("taken", [[2], [0, 4]])
def test_siblings_are_drawn_without_those_of_others(taken: list[int], support: int) -> None:
    asks = [ask(seed, [2], told(*taken), Sampling(), support) for seed in range(TEXTS)]
    left = [token for token in range(len(LAW)) if token not in taken]
    pairs = list(permutations(left, 2))
    total = LAW[left].sum()
    law = [LAW[a] / total * LAW[b] / (total - LAW[a]) for a, b in pairs]
    counts = np.zeros(len(pairs))
    for pair in tokens(asks):
        counts[pairs.index((pair[0], pair[1]))] += 1
    assert chi_square_p_value(counts, np.array(law)) > 1e-4


@pytest.mark.parametrize("support", [0, 5])
@pytest.mark.parametrize("count", [1, 2])
def test_a_row_is_shaped_by_its_own_texts_sampling(count: int, support: int) -> None:
    """Any row that is sent as it was drawn from is exact; only this one is near the target's."""
    samplings = [Sampling(temperature=0.5), Sampling(top_k=2), Sampling(top_p=0.6)]
    asks = [ask(seed, [count], [], each, support) for seed, each in enumerate(samplings)]
    logits = torch.tensor(LAW, dtype=torch.float32).log().expand(len(asks), -1).clone()
    drawn = draw(asks, logits, range(len(asks)))
    drafts = drafts_of([ToHost(own, [0] * count, distinct=True) for own in drawn])
    cut = np.array([np.square(LAW), [0.4, 0.3, 0, 0, 0], [0.4, 0.3, 0, 0, 0]])
    for grown, law in zip(drafts, cut / cut.sum(1, keepdims=True), strict=True):
        row = np.zeros(len(LAW))
        row[grown.draft.ids] = grown.draft.weights  # type: ignore[union-attr]
        assert row / row.sum() == pytest.approx(law, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_text_is_drafted_what_its_target_lacks(temperature: float) -> None:
    """Texts of targets with different vocabularies, in one batch."""
    sampling = Sampling(temperature=temperature)
    asks = [ask(seed, [1], [], sampling) for seed in range(100)]
    for place, one in enumerate(asks):
        one.vocab_size = 2 + place % 4
    logits = torch.arange(len(LAW), dtype=torch.float32).expand(len(asks), -1).clone()
    drawn = draw(asks, logits, range(len(asks)))
    found = {i % 4: 0 for i in range(4)}
    for place, (token,) in enumerate(tokens_of([ReadTokens(one) for one in drawn])):
        found[place % 4] = max(found[place % 4], token)
    assert found == {0: 1, 1: 2, 2: 3, 3: 4}, "the last id of each is the likeliest"


def test_later_rows_are_drawn_whole() -> None:
    asks = [ask(seed, [1, 1], told(0), Sampling()) for seed in range(TEXTS)]
    counts = np.zeros(len(LAW))
    for first, second in tokens(asks, rows=2):
        assert first != 0
        counts[second] += 1
    assert chi_square_p_value(counts, LAW) > 1e-4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_groups_of_one_row_are_drawn_apart_and_share_it(temperature: float) -> None:
    """One head's row, at every place of a depth."""
    other = np.array([0.1, 0.1, 0.2, 0.2, 0.4])
    pairs = np.zeros((len(LAW), len(LAW)))
    for seed in range(TEXTS if temperature else 1):
        one = ask(seed, [2, 1, 1], [], Sampling(temperature=temperature))
        one.rows = [0, 1, 1]
        rows = torch.tensor(np.stack([LAW, other]), dtype=torch.float32).log()
        (drawn,) = draw([one], rows, [0])
        (grown,) = drafts_of([ToHost(drawn, [0, 0, 1, 2], distinct=True)])
        draft = grown.draft  # type: ignore[union-attr]
        assert draft.token_ids[0] != draft.token_ids[1]
        pairs[draft.token_ids[2], draft.token_ids[3]] += 1
        if temperature:
            assert draft.row_of == [0, 0, 1, 1]
            assert draft.sizes == [len(LAW)] * 2
        else:
            assert draft.token_ids == [0, 1, 4, 4]
            assert draft.row_of == [0, 1, 2, 2], "siblings that are certain have a row each"
    if temperature:
        assert chi_square_p_value(pairs.flatten(), np.outer(other, other).flatten()) > 1e-4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_others_left_nothing_there_is_no_node(temperature: float) -> None:
    others = told(3, 1, 0, 2)
    one = ask(1, [3], others, Sampling(temperature=temperature))
    assert tokens([one])[0][0] == 4
    logits = torch.tensor(LAW, dtype=torch.float32).log()[None]
    (drawn,) = draw([one], logits, [0])
    (grown,) = drafts_of([ToHost([*others, *drawn], [0] * 7, distinct=True)])
    assert grown is not None
    assert grown.draft.token_ids == [3, 1, 0, 2, 4]  # type: ignore[union-attr]


@pytest.mark.parametrize("others", [(), (0,)])
def test_of_a_row_of_which_nothing_is_left_comes_what_was_taken(others: tuple[int, ...]) -> None:
    """Or the next part of a forest would leave out a token that nobody has drawn."""
    logits = torch.tensor([0.0, 0.0, -torch.inf, -torch.inf, -torch.inf])[None]
    (drawn,) = draw([ask(5, [4], told(*others), Sampling())], logits, [0])
    (found,) = tokens_of([ReadTokens(drawn)])
    assert set(found) <= {0, 1}


def test_at_temperature_0_the_likeliest_of_the_others() -> None:
    greedy = Sampling(temperature=0)
    assert tokens([ask(0, [2], told(0, 2), greedy), ask(0, [2], told(1), greedy)]) == [
        [1, 3],
        [0, 2],
    ]


def test_what_comes_home_by_one_copy_is_what_was_sent() -> None:
    """Of any dtype and size, none among them, and of parts of other tensors."""
    whole = torch.arange(24, dtype=torch.float64).view(4, 6)
    sent = [
        torch.arange(5, dtype=torch.int64),
        whole[:, ::3],
        torch.arange(3, dtype=torch.int16),
        torch.zeros(0, 7, dtype=torch.int64),
        torch.tensor([[True], [False]]),
        whole,
    ]
    for found, expected in zip(parted(joined(sent), sent), sent, strict=True):
        assert found.dtype == expected.dtype
        assert found.equal(expected)
