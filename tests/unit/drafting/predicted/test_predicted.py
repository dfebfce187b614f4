"""Methods that draft what the target predicted: what they draft, and what would bias a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tandem.drafting.drafter import Drafter, DraftSequence
from tandem.drafting.predicted.jacobi import JacobiDrafter
from tandem.drafting.predicted.lookahead import LookaheadDrafter, LookaheadRecipe
from tandem.drafting.predicted.masks import MasksDrafter
from tandem.engine.asks import DrawFrom, Steps, Truncation
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import FeedbackWanted, Predicted, Row
from tandem.speculation.request.sampling import Sampling
from tandem.verification import VERIFIERS
from tests.support.laws.methods import Enumeration
from tests.support.laws.tables import Table

LENGTH, GAMMA, NODES = 4, 3, 6
VOCAB_SIZE = 100
SEEN = 1e-4


def begun(drafter: Drafter, *token_ids: int) -> DraftSequence:
    sequence = DraftSequence(list(token_ids[:-1]), Sampling(seed=1), VOCAB_SIZE)
    drafter.observe(sequence, token_ids[-1:])
    return sequence


def drafted(drafter: Drafter, sequence: DraftSequence, gamma: int = 4, budget: int = 64) -> Draft:
    steps = drafter.draft(sequence, 1, gamma, budget)
    with pytest.raises(StopIteration) as ended:
        next(steps)
    draft: Draft = ended.value.value
    return draft


def told(places: Sequence[int], ids: Sequence[int]) -> Predicted:
    rows = [Row(np.array([token], np.uint32), np.ones(1, np.uint16)) for token in ids]
    return dict(zip(places, rows, strict=True))


def test_jacobi_goes_on_with_the_predictions_behind_the_place_where_it_ended() -> None:
    drafter = JacobiDrafter()
    sequence = begun(drafter, 1, 2, 3)
    assert drafted(drafter, sequence).token_ids == [3, 3, 3, 3]
    # The first token was kept and the second was wrong: its prediction is at place 2.
    sequence.feedback.predicted = told(range(5), [3, 11, 12, 13, 14])
    drafter.observe(sequence, [3, 11])
    assert drafted(drafter, sequence).token_ids == [12, 13, 14, 14]
    drafter.observe(sequence, [5, 6])  # without predictions: a round of another drafter's
    sequence.feedback.predicted = None
    drafter.observe(sequence, [7])
    assert drafted(drafter, sequence).token_ids == [7, 7, 7, 7]


def test_jacobi_drafts_no_more_than_is_asked_for() -> None:
    drafter = JacobiDrafter()
    sequence = begun(drafter, 1, 2)
    sequence.feedback.predicted = told(range(5), [1, 2, 3, 4, 5])
    drafter.observe(sequence, [9])
    assert drafted(drafter, sequence, gamma=2).token_ids == [2, 3]


def test_a_lookahead_window_grows_and_makes_n_grams() -> None:
    drafter = LookaheadDrafter(window=2, ngram=3, candidates=2)
    sequence = begun(drafter, 1, 2, 3, 4)
    first = drafted(drafter, sequence)
    assert first.token_ids == []  # 4 begins no n-gram of the text
    assert first.probes.token_ids == (1, 3)  # spread over the text
    assert first.probes.parents == (0, 1)
    sequence.feedback.predicted = told([0, 1, 2], [5, 6, 7])
    drafter.observe(sequence, [5])
    second = drafted(drafter, sequence)
    # The second row hangs under the first, column by column.
    assert second.probes.token_ids == (1, 3, 6, 7)
    assert second.probes.parents == (0, 1, 1, 2)
    sequence.feedback.predicted = told([0, 1, 2, 3, 4], [3, 0, 0, 8, 9])
    drafter.observe(sequence, [3])
    third = drafted(drafter, sequence)
    # 3 began 3 4 5 in the text, and the window's column 3 7 9 came last.
    assert (third.token_ids, third.parents) == ([7, 9, 4, 5], [0, 1, 0, 3])
    assert third.probes.token_ids == (6, 7, 8, 9)
    places = len(third) + 1
    assert third.probes.parents == (0, places, places, places + 1)


def test_a_window_whose_predictions_did_not_come_stays_as_it_is() -> None:
    drafter = LookaheadDrafter(window=2, ngram=3, candidates=2)
    sequence = begun(drafter, 1, 2, 3, 4)
    before = drafted(drafter, sequence).probes
    for predictions in (None, told([0, 1], [5, 6])):
        sequence.feedback.predicted = predictions
        drafter.observe(sequence, [5])
        assert drafted(drafter, sequence).probes == before


def test_without_a_window_nothing_is_asked_for() -> None:
    drafter = LookaheadDrafter(window=0, ngram=3, candidates=2)
    assert drafter.traits.feedback == FeedbackWanted()
    draft = drafted(drafter, begun(drafter, 4, 5, 6, 1, 4))
    assert (draft.token_ids, len(draft.probes)) == ([5, 6], 0)


def test_a_lookahead_that_no_target_could_compute_is_refused() -> None:
    with pytest.raises(ValueError, match=r"may be 256, and is 288"):
        LookaheadRecipe(window=8, ngram=10, candidates=24)


def test_masks_hang_at_each_place_and_are_drawn_from_where_the_round_ended() -> None:
    drafter = MasksDrafter(2, 4, Truncation(1.0, 0))
    sequence = begun(drafter, 1, 2)
    first = drafted(drafter, sequence)
    assert (first.token_ids, first.probes.token_ids) == ([], (VOCAB_SIZE, VOCAB_SIZE + 1))
    assert first.probes.parents == (0, 1)
    row = Row(np.array([3, 4], np.uint32), np.array([65535, 60000], np.uint16))
    other = Row(np.array([5], np.uint32), np.array([65535], np.uint16))
    sequence.feedback.predicted = {0: row, 1: row, 2: other}
    drafter.observe(sequence, [9])
    steps = drafter.draft(sequence, 2, 4, 64)
    ask = next(steps)
    assert isinstance(ask, DrawFrom)
    assert [own.ids.tolist() for own in ask.rows] == [[3, 4], [5]]
    drawn = Draft([4, 5], [2, 0], row.ids, row.weights)
    with pytest.raises(StopIteration) as ended:
        steps.send(drawn)
    draft = ended.value.value
    assert draft.token_ids == [4, 5]
    assert draft.probes.token_ids == (100, 101) * 3
    assert draft.probes.parents == (0, 3, 1, 5, 2, 7)
    assert len(draft.probes) == drafter.traits.feedback.probes
    # What comes of a round that ended at place 1: the groups' places are 3..8.
    sequence.feedback.predicted = {0: row, 1: row, 5: row, 6: other}
    drafter.observe(sequence, [4, 8])
    assert [own.ids.tolist() for own in sequence.state] == [[3, 4], [5]]


class FromAnotherGroup(MasksDrafter):
    """Draws from the group where the round ended, and sends the rows of the group at place 0."""

    def __init__(self, count: int, top: int, truncation: Truncation) -> None:
        super().__init__(count, top, truncation)
        wanted = replace(self.traits.feedback, everywhere=True)
        self.traits = replace(self.traits, feedback=wanted)
        self._size = count

    def observe(self, sequence: DraftSequence, emitted: Sequence[int]) -> None:
        rows, candidates = sequence.feedback.predicted, sequence.state or 0
        if rows is not None:
            firsts = [candidates + 1 + place * self._size for place in (len(emitted) - 1, 0)]
            own, self.other = (
                [rows[first + number] for number in range(self._size)] for first in firsts
            )
            kept = range(candidates + 1, candidates + 1 + self._size)
            sequence.feedback.predicted = dict(zip(kept, own, strict=True))
        super().observe(sequence, emitted)

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        draft = yield from super().draft(sequence, round_, gamma, budget)
        dense = np.ones((len(draft), 3), np.uint16)  # so that every token has a weight
        for weights, row in zip(dense, self.other if len(draft) else (), strict=False):
            weights[row.ids] += row.weights
        ids = np.tile(np.arange(3, dtype=np.uint32), len(draft))
        return replace(draft, sizes=[3] * len(draft), ids=ids, weights=dense.flatten())


class Withdrawing(MasksDrafter):
    """Leaves out a last token that its row gave little weight."""

    def draft(self, sequence: DraftSequence, round_: int, gamma: int, budget: int) -> Steps[Draft]:
        draft = yield from super().draft(sequence, round_, gamma, budget)
        if len(draft) > 1 and draft.token_ids[-1] == 0:
            sequence.state = len(draft) - 1
            probes = self._groups(len(draft) - 1, sequence.vocab_size)
            draft = replace(draft.first(len(draft) - 1), probes=probes)
        return draft


def enumerated(drafter: Drafter) -> Enumeration:
    return Enumeration(drafter, 0, Table(LENGTH + GAMMA, 3, zeros=False), LENGTH, GAMMA, NODES)


@pytest.mark.parametrize("kind", [FromAnotherGroup, Withdrawing])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_mutant_of_masks_is_caught(kind: type[MasksDrafter], rule: str) -> None:
    truncation = Truncation(1.0, 0)
    assert enumerated(MasksDrafter(2, 3, truncation)).error(VERIFIERS[rule]) < 1e-12
    assert enumerated(kind(2, 3, truncation)).error(VERIFIERS[rule]) > SEEN


@pytest.mark.parametrize(
    "drafter",
    [JacobiDrafter(), LookaheadDrafter(2, 3, 2), MasksDrafter(2, 3, Truncation(1.0, 0))],
)
def test_any_predictions_at_all_leave_the_law_as_it_is(drafter: Drafter) -> None:
    """A target that tells nonsense costs acceptance, and nothing else."""

    def nonsense(own: Predicted) -> Predicted:
        return dict(zip(own, list(own.values())[::-1], strict=True))

    enumeration = enumerated(drafter)
    enumeration.garbled = nonsense
    for rule in ("token", "block"):
        assert enumeration.error(VERIFIERS[rule]) < 1e-12


def test_what_the_window_learnt_is_drafted() -> None:
    """Whole decodings reach drafts that the text's own n-grams do not explain."""
    enumerations = [enumerated(LookaheadDrafter(window, 3, 2)) for window in (2, 0)]
    for enumeration in enumerations:
        assert enumeration.error(VERIFIERS["token"]) < 1e-12
    of_window, of_text = (
        {
            (found.text, tuple(draft.token_ids))
            for found in enumeration.outcomes
            for draft in found.drafts
        }
        for enumeration in enumerations
    )
    assert of_window - of_text
