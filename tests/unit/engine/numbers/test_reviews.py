"""Reviews follow the rows that they hand out, not the ones before truncation and rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from tandem.engine.answers import ReviewAnswer
from tandem.engine.asks import Review, Truncation
from tandem.engine.numbers import reviews
from tandem.engine.numbers.reviews import review
from tandem.inference.feed import Feed
from tandem.speculation.categorical import Categorical
from tandem.speculation.distribution import process
from tandem.speculation.draft import Draft
from tandem.speculation.request.sampling import Sampling
from tests.support.laws.tables import cache_of

SAMPLING = Sampling(temperature=0.8)
# Two of six tokens stay.
SHORT = Truncation(0.999, 2)
LOGITS = torch.tensor([[2.0, 1.5, 1.0, 0.5, 0.0, -1.0], [0.0, 2.0, 1.0, 2.5, 0.0, 0.0]])
Q = np.array([30, 20, 25, 15, 5, 5], np.uint16)


def asked(guess: Draft, uniforms: Any, rows: int | None = None, **changes: Any) -> Review:
    rows = len(guess) + 1 if rows is None else rows
    feed = Feed(cache_of(8), [0] * rows, rows)
    keys: dict[str, Any] = {"rule": "token", "truncation": SHORT, "vocab_size": 6, **changes}
    return Review(None, feed, guess, sampling=SAMPLING, uniforms=np.array(uniforms), **keys)  # type: ignore[arg-type]


def drawn(token: int) -> Draft:
    return Draft([token], [6], np.arange(6, dtype=np.uint32), Q)


def told(ask: Review, logits: torch.Tensor = LOGITS) -> ReviewAnswer:
    (found,) = review([ask], logits, [0])
    assert found is not None
    return found


def counts(number: int = 20_000) -> np.ndarray:
    """How often each token comes first, if guesses are drawn from Q."""
    rng = np.random.default_rng(3)
    tokens = rng.choice(6, number, p=Q / Q.sum())
    asks = [asked(drawn(int(token)), rng.random(2)) for token in tokens]
    found = review(asks, LOGITS, [0] * number)
    return np.bincount([one.token_ids[0] for one in found if one], minlength=6)


def rounded() -> np.ndarray:
    rows = Categorical.quantize(process(LOGITS, [SAMPLING] * 2), SHORT.mass, SHORT.support)
    law = np.zeros(6)
    law[rows.ids[0].numpy()] = rows.weights[0].numpy()
    law /= law.sum()
    return law


def test_what_comes_follows_the_row_that_is_sent() -> None:
    law, found = rounded(), counts()
    assert not found[law == 0].any()
    assert chisquare(found[law > 0], 20_000 * law[law > 0]).pvalue > 1e-4
    ids, weights = told(asked(drawn(0), [0.5, 0.5])).rows[0]
    assert (weights / weights.sum()).tolist() == pytest.approx(law[ids].tolist())


def test_the_reviewers_unrounded_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided against the distribution before it is cut: other tokens than those sent come."""
    own = reviews._rows

    def uncut(asks: Any, logits: Any, firsts: Any) -> Any:
        for ask in asks:
            ask.truncation = Truncation(1.0, 0)
        return own(asks, logits, firsts)

    monkeypatch.setattr(reviews, "_rows", uncut)
    assert counts()[rounded() == 0].any()


def test_kept_tokens_and_what_follows_have_the_rows_of_their_places() -> None:
    # Both tokens of the row are kept at u = 0; at u = 1 the guess is not.
    kept = told(asked(drawn(0), [0.0, 0.0]))
    assert (kept.kept, kept.token_ids[0], len(kept.rows)) == (1, 0, 2)
    assert set(kept.rows[1][0].tolist()) == {1, 3}
    other = told(asked(drawn(4), [0.999, 0.0]))
    assert (other.kept, other.token_ids, len(other.rows)) == (0, [0], 1)
    # Without a row after it, nothing follows a guess that is kept whole.
    filled = told(asked(drawn(0), [0.0, 0.0], rows=1))
    assert (filled.kept, filled.token_ids, len(filled.rows)) == (1, [0], 1)
    rejected = told(asked(drawn(4), [0.999, 0.0], rows=1))
    assert (rejected.kept, rejected.token_ids) == (0, [0])


def test_without_a_guess_a_token_is_drawn() -> None:
    found = told(asked(Draft.certain([]), [0.999]))
    assert (found.kept, found.token_ids) == (0, [1])


def test_guesses_of_several_sizes_and_rules_share_a_step() -> None:
    certain = Draft.certain([0, 1])
    asks = [
        asked(certain, [0.0, 0.0, 0.0]),
        asked(Draft.certain([]), [0.0]),
        asked(drawn(0), [0.0, 0.0], rule="block"),
        asked(certain, [0.0, 0.0, 0.0], truncation=Truncation(1.0, 0)),
    ]
    logits = torch.cat([LOGITS, LOGITS[:1], LOGITS[1:], LOGITS, LOGITS, LOGITS[:1]])
    found = review(asks, logits, [0, 3, 4, 6])
    assert [one.token_ids[: one.kept] for one in found if one] == [[0, 1], [], [0], [0, 1]]
    assert found[3] is not None
    assert len(found[3].rows[0][0]) == 6


def test_large_steps_are_decided_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = drawn(0), Draft.certain([]), drawn(2)
    asks = [asked(first, [0.3, 0.6]), asked(second, [0.2]), asked(third, [0.1, 0.9])]
    logits = torch.cat([LOGITS, LOGITS[:1], LOGITS])
    whole = review(asks, logits, [0, 2, 3])
    parts, own = list[int](), reviews._reviewed

    def counted(group: Any, *rest: Any) -> Any:
        parts.append(len(group))
        return own(group, *rest)

    monkeypatch.setattr(reviews, "_MOST", 12)
    monkeypatch.setattr(reviews, "_reviewed", counted)
    found = review(asks, logits, [0, 2, 3])
    assert parts == [1, 1, 1]
    assert [one and one.token_ids for one in found] == [one and one.token_ids for one in whole]


def test_leniency_keeps_more() -> None:
    strict, lenient = (
        sum(told(asked(drawn(2), [u, 0.0], truncation=Truncation(1.0, 0), leniency=factor)).kept
            for u in np.linspace(0, 0.999, 50))
        for factor in (1.0, 1.5)
    )  # fmt: skip
    assert 0 < strict < lenient


def test_a_guess_beyond_the_vocabulary_is_never_kept() -> None:
    outside = Draft.certain([9])
    found = told(asked(outside, [0.0, 0.0]))
    assert (found.kept, found.token_ids) == (0, [0])
    # Nor is one beyond the target's, though the reviewer knows it.
    found = told(asked(Draft.certain([1]), [0.0, 0.0], vocab_size=1))
    assert (found.kept, found.token_ids) == (0, [0])


def test_rows_that_are_not_finite_are_none() -> None:
    assert review([asked(drawn(0), [0.0, 0.0])], LOGITS * torch.nan, [0]) == [None]
