"""Tandem's rule in the place of vLLM's rejection sampling."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from tandem.speculation.draft import Draft
from tandem.verification import VERIFIERS
from tandem_vllm import rule
from tandem_vllm.rule import DraftedRows, TextNumbers
from tests.support.laws.laws import chi_square_p_value

VOCAB_SIZE, GAMMA = 3, 3
# Of places; a row of the drafter has a token that it never draws, and the target's another one.
P = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.0, 0.8], [0.1, 0.5, 0.4], [0.3, 0.3, 0.4]])
WEIGHTS = np.array([[40, 0, 60], [50, 25, 25], [1, 97, 2]])


def drawn(generator: np.random.Generator, length: int) -> Draft:
    rows = WEIGHTS[:length]
    tokens = [int(generator.choice(VOCAB_SIZE, p=row / row.sum())) for row in rows]
    sizes = [int((row > 0).sum()) for row in rows]
    ids = np.concatenate([np.flatnonzero(row) for row in rows]) if length else np.zeros(0)
    weights = np.concatenate([row[row > 0] for row in rows]) if length else np.zeros(0)
    return Draft(tokens, sizes, ids.astype(np.uint32), weights.astype(np.uint16))


def lengths_of(drafts: list[Draft]) -> list[int]:
    return [len(draft) for draft in drafts]


def pick(generator: np.random.Generator, place: int) -> int:
    """A token of the target's."""
    row = P[place].double().numpy()
    return int(generator.choice(VOCAB_SIZE, p=row / row.sum()))


@pytest.mark.parametrize("most_numbers", [1 << 25, 1])
@pytest.mark.parametrize("name", ["block", "token"])
def test_texts_have_the_targets_law(
    name: str, most_numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of 0 to 3 tokens in one batch; what follows a round is drawn from the target."""
    monkeypatch.setattr(rule, "_MOST_NUMBERS", most_numbers)
    count = 6_000 if most_numbers > 1 else 300  # a row at a time
    generator = np.random.default_rng(3)
    drafts = [drawn(generator, int(n)) for n in generator.integers(0, GAMMA + 1, count)]
    rounds = generator.integers(1, 1_000, count).tolist()
    numbers = [TextNumbers(seed) if len(draft) else None for seed, draft in enumerate(drafts)]
    bonus = [[pick(generator, len(draft))] for draft in drafts]
    logits = torch.cat([P[: len(draft)] for draft in drafts]).log()
    rows = DraftedRows(VERIFIERS[name], lengths_of(drafts), drafts, rounds, numbers)
    found = rows.decide(logits, torch.tensor(bonus), torch.ones(count))
    assert found.dtype == torch.int32
    assert found.shape == (count, GAMMA + 1)
    texts = []
    for row, draft in zip(found.tolist(), drafts, strict=True):
        kept = [token for token in row if token >= 0]
        assert 1 <= len(kept) <= len(draft) + 1
        assert row[len(kept) :] == [-1] * (len(row) - len(kept))
        rest = range(len(kept), GAMMA + 1)
        texts.append([*kept, *(pick(generator, place) for place in rest)])
    law = [
        float(np.prod([P[n, token] for n, token in enumerate(text)]))
        for text in product(range(VOCAB_SIZE), repeat=GAMMA + 1)
    ]
    cells = [tuple(text) for text in product(range(VOCAB_SIZE), repeat=GAMMA + 1)]
    counts = np.array([sum(tuple(text) == cell for text in texts) for cell in cells])
    assert chi_square_p_value(counts, np.array(law)) > 1e-4


def test_the_rows_of_a_batch_do_not_touch_each_other() -> None:
    generator = np.random.default_rng(5)
    drafts = [drawn(generator, n) for n in (3, 0, 1, 2, 3)]
    bonus = torch.tensor([[0], [2], [1], [0], [2]])
    temperature = torch.tensor([1.0, 0.0, 0.0, 0.7, 0.0])
    logits = [P[: len(draft)].log() for draft in drafts]

    def decide(places: list[int]) -> list[list[int]]:
        rows = DraftedRows(
            VERIFIERS["block"],
            lengths_of([drafts[i] for i in places]),
            [drafts[i] for i in places],
            [7 + i for i in places],
            [TextNumbers(i) for i in places],
        )
        found = rows.decide(
            torch.cat([logits[i] for i in places]), bonus[places], temperature[places]
        )
        return [[token for token in row if token >= 0] for row in found.tolist()]

    together = decide([0, 1, 2, 3, 4])
    assert together == [decide([i])[0] for i in range(5) if i != 1][:1] + [[2]] + [
        decide([i])[0] for i in (2, 3, 4)
    ]


@pytest.mark.parametrize("temperature", [None, torch.zeros(2)])
def test_at_temperature_0_the_likeliest_tokens_are_kept(temperature: torch.Tensor | None) -> None:
    likeliest = P.argmax(-1).tolist()
    right = Draft.certain(likeliest[:2])
    wrong = Draft.certain([likeliest[0], (likeliest[1] + 1) % VOCAB_SIZE, likeliest[2]])
    rows = DraftedRows(
        VERIFIERS["block"], [2, 3], [right, wrong], [1, 1], [TextNumbers(1), TextNumbers(2)]
    )
    logits = torch.cat((P[:2], P[:3])).log()
    found = rows.decide(logits, torch.tensor([[likeliest[2]], [0]]), temperature)
    assert found.tolist() == [[*likeliest[:3], -1], [*likeliest[:2], -1, -1]]


def test_a_round_is_decided_alike_on_each_rank() -> None:
    draft = drawn(np.random.default_rng(1), 3)
    logits, bonus = P[:3].log(), torch.tensor([[1]])
    found = [
        DraftedRows(VERIFIERS["block"], [3], [draft], [round_], [TextNumbers(9)])
        .decide(logits, bonus, torch.ones(1))
        .tolist()
        for round_ in (4, 4, *range(5, 25))
    ]
    assert found[0] == found[1]
    assert len({str(each) for each in found}) > 1


def test_rows_that_vllm_pads_leave_the_others_alone() -> None:
    draft = drawn(np.random.default_rng(1), 2)
    nothing = Draft.certain(())
    bonus, hot = torch.tensor([[0], [1], [2]]), torch.ones(3)
    alone = DraftedRows(VERIFIERS["block"], [2], [draft], [4], [TextNumbers(9)])
    expected = alone.decide(P[:2].log(), bonus[1:2], hot[:1]).tolist()[0]
    rows = DraftedRows(
        VERIFIERS["block"],
        [3, 2, 0],
        [nothing, draft, nothing],
        [0, 4, 0],
        [None, TextNumbers(9), None],
    )
    assert rows.padded == [0]
    found = rows.decide(torch.cat((P[:3], P[:2])).log(), bonus, hot).tolist()
    assert found[1] == [*expected, -1]
    assert found[2] == [2, -1, -1, -1]
