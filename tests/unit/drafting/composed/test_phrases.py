"""Phrases: what is guessed and sent after a draft, what they are made of, and whose they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tandem.drafting.choice.recipe_file import recipe_from
from tandem.drafting.composed import phrases
from tandem.drafting.composed.phrases import PhraseGuesser, PhrasesDrafter, PhrasesRecipe
from tandem.drafting.drafter import DraftSequence
from tandem.engine.asks import Steps, Truncation
from tandem.retrieval.ngrams import NgramPool
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import Predicted, Row
from tandem.speculation.request.sampling import Sampling
from tandem.verification import VERIFIERS
from tests.support.laws.methods import Enumeration
from tests.support.laws.suited import rules_for
from tests.support.laws.tables import (
    PROMPT,
    VOCAB_SIZE,
    Answering,
    Chooser,
    Table,
    Text,
    cache_of,
    scorers_of,
)

TOLERANCE, SEEN = 1e-12, 1e-3
LENGTH, GAMMA, NODES = 5, 4, 8


@pytest.fixture(autouse=True)
def _long_suffixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suffixes take half of a draft, so that short texts have suffixes of two tokens."""
    monkeypatch.setattr(phrases, "_SHARE", 2)


def made(seed: int = 1, length: int = LENGTH, *, zeros: bool = True, **keys: Any) -> Enumeration:
    recipe = recipe_from({"method": "phrases", "ngram": 3, "suffixes": 3, **keys})
    longest = LENGTH + GAMMA
    scorers = scorers_of(recipe, longest, 10 * seed + 1, zeros=zeros, depths=())
    drafter = recipe.make(scorers, Truncation(1.0, 0))
    target = Table(longest, 10 * seed, zeros=zeros)
    return Enumeration(drafter, len(scorers), target, length, GAMMA, NODES)


def suffixes_of(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens of each end after the place where the chain ends."""
    tree, tokens = draft.tree, draft.token_ids
    ends = [place for place in range(len(draft) + 1) if tree.is_leaf(place)]
    forks = [place for place in range(len(draft)) if len(tree.children_of(place)) > 1]
    first = len(draft.path_to(forks[0])) if forks else 0
    return [tuple(tokens[at - 1] for at in draft.path_to(end))[first:] for end in ends]


@pytest.mark.parametrize(
    ("seed", "keys"),
    [
        (1, {"rule": "block"}),
        (2, {"rule": "token", "pool": 3}),
        (1, {"suffixes": 0}),
    ],
)
def test_phrases_leave_the_law_as_it_is(seed: int, keys: dict[str, Any]) -> None:
    # Longer texts have more rounds, and without suffixes many more drafts.
    enumeration = made(seed, LENGTH - 2 * (keys.get("suffixes") == 0), **keys)
    rules = rules_for(enumeration.drafter)
    assert {"token", "block"} <= {rule.name for rule in rules}
    assert not any(rule.needs_every_draft for rule in rules)
    for rule in rules:
        assert enumeration.error(rule) < TOLERANCE, rule.name
    assert enumeration.deepest == min(GAMMA, enumeration.length)


def test_what_is_sent_follows_what_was_rejected() -> None:
    """One text, drafted one way, has other suffixes after other drafts that were rejected."""
    enumeration = made()
    enumeration.error(VERIFIERS["token"])
    found: dict[Any, set[Any]] = {}
    for outcomes in enumeration.outcomes:
        for draft in outcomes.drafts:
            drawn = sum(size > 0 for size in draft.sizes)
            key = outcomes.text, tuple(draft.token_ids[:drawn])
            found.setdefault(key, set()).add((tuple(draft.places()), tuple(draft.token_ids)))
    assert max(map(len, found.values())) > 2
    drafts = [draft for outcomes in enumeration.outcomes for draft in outcomes.drafts]
    assert max(len(suffixes_of(draft)) for draft in drafts) == 3, "no draft has all suffixes"


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is kept has what others left there."""
    own: Any = PhraseGuesser._pool

    def pool_with_others(self: PhraseGuesser, salt: str | None, seed: int) -> NgramPool:
        pool: NgramPool = own(self, salt, seed)
        for ngram in ((0, 2, 1), (1, 1, 1), (2, 0, 2), (1, 2, 0)):
            pool.add(ngram)
        return pool

    monkeypatch.setattr(PhraseGuesser, "_pool", pool_with_others)


@pytest.mark.usefixtures("left")
def test_phrases_of_another_text_leave_it_too() -> None:
    enumeration = made(2, length=4, kept=True)
    for rule in ("token", "block"):
        assert enumeration.error(VERIFIERS[rule]) < TOLERANCE


def _at_another_place(enumeration: Enumeration) -> None:
    """Suffixes are computed as if they hung one place before the draft's end."""

    def scored(draft: Draft, path: list[int]) -> list[int]:
        chain = sum(size > 0 for size in draft.sizes)
        return path if len(path) <= chain else [*path[: chain - 1], *path[chain:]]

    enumeration.scored = scored


def _refined_at_once(enumeration: Enumeration) -> None:
    """The target's predictions at a draft are judged in the place of its suffixes, by the rows
    after what was drafted."""
    was: dict[int, tuple[Draft, Draft]] = {}
    own: Any = enumeration.drafter.draft

    def draft(sequence: DraftSequence, *args: Any) -> Steps[Draft]:
        sent: Draft = yield from own(sequence, *args)
        chain, text = sum(size > 0 for size in sent.sizes), sequence.token_ids[len(PROMPT) :]
        refined = list(sent.token_ids)
        for place in range(chain + 1, len(sent) + 1):
            siblings = sent.tree.children_of(sent.places()[place - 1])
            if len(siblings) > 1:
                return sent  # one suffix will do
            before = [sent.token_ids[at - 1] for at in sent.path_to(place)][:-1]
            refined[place - 1] = int(enumeration._p((*text, *before)).argmax())
        answer = replace(sent, token_ids=refined)
        was[id(answer)] = sent, answer
        return answer

    def scored(draft: Draft, path: list[int]) -> list[int]:
        return was[id(draft)][0].token_ids[: len(path)] if id(draft) in was else path

    enumeration.drafter.draft = draft  # type: ignore[assignment, method-assign]
    enumeration.scored = scored


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("mutant", [_at_another_place, _refined_at_once])
def test_suffixes_that_break_the_contract_are_seen(
    mutant: Callable[[Enumeration], None], rule: str
) -> None:
    enumeration = made(length=4, suffixes=1, zeros=False)
    mutant(enumeration)
    assert enumeration.error(VERIFIERS[rule]) > SEEN


class Counting(Table):
    """The reviewer's next token is the next id: 0 1 2 0 1 2 ..."""

    def __init__(self) -> None:
        super().__init__(0, 0, zeros=False)

    def row(self, text: Text) -> npt.NDArray[np.int64]:
        row: npt.NDArray[np.int64] = np.eye(VOCAB_SIZE, dtype=np.int64)[(text[-1] + 1) % VOCAB_SIZE]
        return row


def drafting(**keys: Any) -> PhrasesDrafter:
    return PhrasesRecipe(ngram=3, **keys).make([Counting()], Truncation(1.0, 0))


def begun(drafter: PhrasesDrafter, *token_ids: int) -> DraftSequence:
    sequence = DraftSequence(list(token_ids[:-1]), Sampling(), VOCAB_SIZE)
    sequence.caches = [cache_of(100)]
    Answering(Chooser(()), None).run(drafter.open(sequence))
    drafter.observe(sequence, token_ids[-1:])
    return sequence


def drafted(
    drafter: PhrasesDrafter, sequence: DraftSequence, gamma: int = 4, budget: int = 16
) -> tuple[list[int], list[int]]:
    """Tokens of a draft, and their places."""
    steps = drafter.draft(sequence, 1, gamma, budget)
    draft: Draft = Answering(Chooser(()), None).run(steps)
    return draft.token_ids, list(draft.places())


def passes(drafter: PhrasesDrafter, sequence: DraftSequence, gamma: int) -> int:
    """Asks of a draft for the reviewer."""
    asks: list[Any] = []

    class Noting(Answering):
        def _answer(self, ask: Any) -> Any:
            asks.append(ask)
            return super()._answer(ask)

    Noting(Chooser(()), None).run(drafter.draft(sequence, 1, gamma, 16))
    return len(asks)


def told(ids: Sequence[int]) -> Predicted:
    return {
        place: Row(np.array([token], np.uint32), np.ones(1, np.uint16))
        for place, token in enumerate(ids)
    }


def test_suffixes_are_phrases_of_the_last_token_behind_the_drafts_end() -> None:
    # After a 0 came 2 1, 0 0, 0 2 and 2 2.
    text = 1, 0, 2, 1, 0, 0, 0, 2, 2, 1
    drafter = drafting()
    found = drafted(drafter, begun(drafter, *text))
    assert found == ([2, 0, 2, 0, 2, 2, 0, 1], [0, 1, 2, 2, 3, 4, 4, 3])
    # Two: the phrases that came last. Of fewer nodes what fits.
    fewer = drafting(suffixes=2)
    assert drafted(fewer, begun(fewer, *text)) == ([2, 0, 2, 2, 0, 2], [0, 1, 2, 3, 2, 5])
    assert drafted(drafter, begun(drafter, *text), budget=3)[0] == [2, 0, 2]
    none = drafting(suffixes=0)
    assert drafted(none, begun(none, *text)) == ([2, 0, 1, 2], [0, 1, 2, 3])


def test_phrases_that_guess_right_save_the_reviewer_passes() -> None:
    drafter = drafting(suffixes=0)
    assert passes(drafter, begun(drafter, 0, 0, 1, 2, 0, 1, 2), 4) == 2  # phrases of two tokens
    assert passes(drafter, begun(drafter, 0, 0, 0, 0, 0, 0, 0), 4) == 4


def test_the_targets_predictions_refine_phrases_for_the_next_round() -> None:
    drafter = drafting()
    sequence = begun(drafter, 1, 0, 1, 1)
    assert drafted(drafter, sequence) == ([2, 0, 1, 1], [0, 1, 2, 3])
    pool = sequence.state.inner.state.pool
    assert [tails.tolist() for tails in pool.behind(0, 2)] == [[[1, 1]]]
    # At the draft's end the target says 2, and after the suffix's first token 2.
    sequence.feedback.predicted = told([1, 1, 2, 2, 0])
    drafter.observe(sequence, [0])
    assert [tails.tolist() for tails in pool.behind(0, 2)] == [[[2, 2], [1, 1]]]
    assert [tails.tolist() for tails in pool.behind(1, 2)] == [[[1, 0], [2, 0], [1, 1], [0, 1]]]
    sequence.feedback.predicted = told([0, 0, 0, 0, 0])
    drafter.observe(sequence, [0])  # what came of a draft is learnt once
    assert [tails.tolist() for tails in pool.behind(0, 2)] == [[[2, 2], [1, 1]]]


def test_predictions_that_did_not_come_make_no_phrase() -> None:
    drafter = drafting()
    sequence = begun(drafter, 1, 0, 1, 1)
    drafted(drafter, sequence)
    sequence.feedback.predicted = {place: row for place, row in told([1, 1, 2]).items() if place}
    drafter.observe(sequence, [2])
    pool = sequence.state.inner.state.pool
    assert pool.behind(1, 2)[0].tolist() == [[1, 2], [0, 1]]
    assert pool.behind(2, 2)[0].tolist() == [[1, 2]]  # of places 1 and 2


SEEDS = count(1)


def pool_of(guesser: PhraseGuesser, salt: str | None, seed: int | None = None) -> NgramPool:
    """Of a text, whose seed is its own unless it is given."""
    sampling = Sampling(seed=next(SEEDS) if seed is None else seed)
    sequence = DraftSequence([1], sampling, VOCAB_SIZE, salt=salt)
    with pytest.raises(StopIteration):
        next(guesser.open(sequence))
    pool: NgramPool = sequence.state.pool
    return pool


def test_a_text_has_no_phrases_of_another() -> None:
    guesser = PhraseGuesser(3, 100, kept=False)
    for salt in ("", "a", None):
        pool_of(guesser, salt).add((1, 2, 0))
        assert not pool_of(guesser, salt).behind(1, 2)


def test_phrases_that_are_kept_are_those_of_a_scope() -> None:
    guesser = PhraseGuesser(3, 100, kept=True)
    pool_of(guesser, "a").add((1, 2, 0))
    assert pool_of(guesser, "a").behind(1, 2)
    for other in ("", "b", None):
        assert not pool_of(guesser, other).behind(1, 2)
    pool_of(guesser, None).add((1, 2, 0))
    assert not pool_of(guesser, None).behind(1, 2)


def test_a_text_has_no_phrases_of_one_with_its_seed() -> None:
    """Both draw with the same random numbers: a phrase of the one foretells them to the other."""
    guesser = PhraseGuesser(3, 100, kept=True)
    first = pool_of(guesser, "a", 7)
    assert pool_of(guesser, "a", 8) is first
    again = pool_of(guesser, "a", 7)
    assert again is not first
    assert pool_of(guesser, "b", 7) is not first
    again.add((1, 2, 0))
    assert not pool_of(guesser, "a", 9).behind(1, 2)


def test_phrases_of_many_texts_are_forgotten_with_their_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(phrases, "_SEEDS", 3)
    guesser = PhraseGuesser(3, 100, kept=True)
    pools = [pool_of(guesser, "a", seed) for seed in range(5)]
    assert pools[0] is pools[1] is pools[2]
    assert pools[2] is not pools[3]
    assert pools[3] is pools[4] is pool_of(guesser, "a", 0)


def test_scopes_that_were_used_least_lately_are_forgotten() -> None:
    guesser = PhraseGuesser(3, 100, kept=True)
    pools = {str(n): pool_of(guesser, str(n)) for n in range(phrases._SCOPES)}
    assert pool_of(guesser, "0") is pools["0"]
    pool_of(guesser, "another")
    assert pool_of(guesser, "0") is pools["0"]
    assert pool_of(guesser, "1") is not pools["1"]
    assert len(guesser._scopes) == phrases._SCOPES


def test_ids_that_a_target_does_not_have_are_not_sent() -> None:
    """Its texts may share a pool with those of a target with more ids."""
    drafter = drafting()
    sequence = begun(drafter, 1, 0, 1, 1)
    sequence.state.inner.state.pool.add((1, VOCAB_SIZE, 0))
    sequence.state.inner.state.pool.add((0, VOCAB_SIZE, 0))
    assert drafted(drafter, sequence) == ([2, 0, 1, 1], [0, 1, 2, 3])
