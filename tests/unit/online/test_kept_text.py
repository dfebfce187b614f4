"""What a drafter hears of a text, and what of it is kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tandem.errors import StartupError
from tandem.online.kept_text import (
    TOP,
    HeardText,
    KeptStates,
    KeptText,
    packed,
    unpacked,
    wish_of,
)
from tandem.speculation.feedback import NO_FEEDBACK, Feedback, FeedbackWanted, Row


def row(*ids: int) -> Row:
    return Row(np.array(ids, np.uint32), np.arange(len(ids), 0, -1).astype(np.uint16), sum(ids))


def told(round_: int, *rows: Row) -> list[Feedback]:
    return [Feedback(round_, predicted=dict(enumerate(rows)))]


def heard_text(*steps: tuple[list[int], list[Feedback], int]) -> KeptText | None:
    text = HeardText([5, 6, 7])
    for step in steps:
        text.hear(*step)
    return text.kept


def test_each_row_stands_behind_the_token_that_it_follows() -> None:
    kept = heard_text(
        ([8], [], 0),  # the prefill's token: nothing was drafted
        ([1, 2, 3], told(1, row(1, 9), row(2), row(3, 4, 5)), 3),  # two of three drafted were kept
        ([4, 5], told(2, row(4), row(5)), 1),  # the one that was drafted was kept
    )
    assert kept is not None
    assert kept.token_ids.tolist() == [5, 6, 7, 8, 1, 2, 3, 4, 5]
    assert kept.places.tolist() == [3, 4, 5, 6, 7]
    # A row says the token after its place.
    assert kept.ids[:, 0].tolist() == kept.token_ids[kept.places + 1].tolist()
    assert kept.ids[2, :4].tolist() == [3, 4, 5, 0]
    assert kept.weights[2, :4].tolist() == [3, 2, 1, 0]
    assert kept.rejected.tolist() == [False, False, True, False, False]
    assert kept.masses.tolist() == [10, 2, 12, 4, 5]


@pytest.mark.parametrize("dtype", [np.int16, np.float32])
def test_a_state_that_is_not_finite_is_not_kept(dtype: type) -> None:
    """Of bfloat16 as int16; the row at its place is not kept either."""
    bad = [np.nan, np.inf] if dtype is np.float32 else [0x7FC0, 0x7F80, -0x80]
    for wrong in bad:
        states: np.ndarray = np.ones((3, 1, 2), dtype)
        states[1, 0, 1] = wrong
        text = HeardText([5, 6, 7], keeps=KeptStates(2 * states.itemsize, 2))
        rows = dict(enumerate([row(8), row(1), row(2)]))
        text.hear([8, 1, 2], [Feedback(1, range(2, 5), states, predicted=rows)], 2)
        assert text.kept is not None
        assert text.kept.places.tolist() == [2, 4]
        assert np.isfinite(text.kept.states).all()  # type: ignore[arg-type]


def test_what_does_not_fit_its_tokens_is_not_kept() -> None:
    assert heard_text(([8], [], 0), ([1, 2], [], 4)) is None  # a target that tells nothing
    # Rounds without a draft came in between, or a row was not finite.
    assert heard_text(([1, 2, 3], told(1, row(1)), 4)) is None
    # More came than was drafted.
    assert heard_text(([1, 2, 3], told(1, row(1), row(2), row(3)), 1)) is None
    assert heard_text(([1], [Feedback(1)], 4)) is None


def test_of_a_long_text_rejected_places_are_kept_first() -> None:
    drafted = told(1, row(1), row(2))
    steps = [([1, 2], drafted, 1 if number % 3 else 2) for number in range(1500)]
    kept = heard_text(*steps)
    assert kept is not None
    assert len(kept.places) == 2048
    assert kept.rejected.sum() == 500
    assert (np.diff(kept.places) > 0).all()


def with_states(round_: int, first: int, *rows: Row, width: int = 2) -> list[Feedback]:
    """What a head is told; a state says its place."""
    positions = range(first, first + len(rows))
    states = np.array(positions, np.int16)[:, None, None].repeat(width, 2)
    return [Feedback(round_, positions, states, dict(enumerate(rows)))]


def test_a_head_keeps_the_state_of_each_row() -> None:
    text = HeardText([5, 6, 7], keeps=KeptStates(4, 3))
    text.hear([8], [Feedback(0, range(2, 3), np.zeros((1, 1, 2), np.int16))], 0)  # of the prompt
    text.hear([1, 2], with_states(1, 3, row(1), row(2)), 3)
    text.hear([3, 4], with_states(2, 4, row(3), row(4)), 3)  # states of other places
    text.hear([5], [Feedback(3, predicted={0: row(5)})], 3)  # none
    text.hear([6, 7], with_states(4, 8, row(6), row(7)), 1)
    kept = text.kept
    assert kept is not None
    assert kept.states is not None
    assert kept.places.tolist() == kept.states[:, 0, 1].tolist() == [3, 4, 8, 9]
    (found,) = unpacked(packed([kept]))
    assert found.states is not None
    assert found.states.dtype == np.int16
    assert np.array_equal(found.states, kept.states)
    assert found.bytes == kept.bytes == 4 * 11 + 4 * (4 + 6 * TOP + 1 + 2 + 4)


def test_states_take_two_mib_of_a_text_at_most() -> None:
    """With those that a rejected place is learnt from first."""
    assert KeptStates(1152, 4).most_rows == 1820
    width = 1 << 14
    text = HeardText([5], keeps=KeptStates(2 * width, 2))
    for number in range(150):
        depth = 1 if number % 5 else 2  # each fifth round had one more drafted token
        step = with_states(number, 2 * number, row(1), row(2), width=width)
        text.hear([1, 2], step, depth)
        assert len(text._rows) < 128
    kept = text.kept
    assert kept is not None
    assert kept.states is not None
    assert kept.states.nbytes == 1 << 21
    assert kept.rejected.sum() == 64 // 3
    rejected = set(kept.places[kept.rejected].tolist())
    assert all(rejected & {*range(place, place + 3)} for place in kept.places[:60].tolist())


def test_a_head_with_a_decoder_layer_keeps_one_run_of_places() -> None:
    """The one with the most rejected places; what came after a gap is none of it."""
    text = HeardText([5], keeps=KeptStates(4, 2, remembers=True))
    assert text.keeps.most_rows == 512
    for number in range(900):
        if number == 300:  # a target that told nothing
            text.hear([1, 2], [Feedback(number)], 2)
            continue
        rejects = number in (3, 4) or (number > 300 and number % 10 == 0)
        step = with_states(number, 2 * number, row(1), row(2))
        text.hear([1, 2], step, 1 + rejects)
        assert len(text._rows) < 1024
    kept = text.kept
    assert kept is not None
    assert len(kept.places) == 512
    assert (np.diff(kept.places) == 1).all()
    assert kept.rejected.sum() == 26
    short = HeardText([5], keeps=KeptStates(4, 2, remembers=True))
    for number, place in enumerate((0, 2, 8, 10, 12)):
        short.token_ids = [5] * (place + 1)
        short.hear([1, 2], with_states(number, place, row(1), row(2)), 1)
    assert short.kept is not None
    assert short.kept.places.tolist() == [8, 9, 10, 11, 12, 13]


def test_texts_are_the_same_behind_a_file() -> None:
    one = heard_text(([1, 2], told(1, row(1), row(2, 7)), 4))
    other = heard_text(([3], told(1, row(3, 4)), 2), ([4], told(2, row(4)), 1))
    assert one is not None
    assert other is not None
    one = replace(one, held_out=True)
    for before, after in zip((one, other), unpacked(packed([one, other])), strict=True):
        for name in KeptText.__slots__:
            assert np.array_equal(getattr(before, name), getattr(after, name)), name


def test_files_of_an_earlier_version_do_not_know_the_mass_of_rows() -> None:
    one = heard_text(([1, 2], told(1, row(1), row(2, 7)), 4))
    assert one is not None
    arrays = packed([one, one])
    del arrays["masses"], arrays["held_out"]
    found = unpacked(arrays)
    assert [(each.masses.tolist(), each.held_out) for each in found] == [([0, 0], False)] * 2


def test_the_wish_is_one_of_rows_beside_its_own() -> None:
    states = FeedbackWanted((3,), 64)
    assert wish_of(NO_FEEDBACK, "model") == FeedbackWanted(top=TOP)
    assert wish_of(states, "model") == FeedbackWanted((3,), 64, top=TOP)
    with pytest.raises(StartupError, match="the method phrases does not learn"):
        wish_of(FeedbackWanted(top=1, everywhere=True), "phrases")
