"""Drafts from the text itself: what they are."""

from __future__ import annotations

import pytest

from tandem.drafting.drafter import DraftSequence, go_on
from tandem.drafting.lookups.lookup import LookupDrafter
from tandem.speculation.draft import Draft
from tandem.speculation.request.sampling import Sampling
from tandem.speculation.tree import DraftSize


def draft_behind(text: list[int], gamma: int = 4, *, longest: int = 3, window: int = 100) -> Draft:
    drafter = LookupDrafter(longest, window)
    steps = drafter.draft(DraftSequence(text, Sampling(), 100), 1, gamma, gamma)
    with pytest.raises(StopIteration) as ended:
        next(steps)
    draft: Draft = ended.value.value
    return draft


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2]),
        ([7, 2, 3, 9, 8, 2, 3, 6, 5, 2, 3], [6, 5, 2, 3]),  # the latest place
        ([1, 2, 3, 9, 8, 2, 3, 6, 4, 1, 2, 3], [9, 8, 2, 3]),  # the longest run
        ([5, 5, 5, 5], [5]),
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_a_draft_is_what_followed_the_last_tokens_before(
    text: list[int], drafted: list[int]
) -> None:
    draft = draft_behind(text)
    assert draft.token_ids == drafted
    assert draft.sizes == [0] * len(drafted), "certain"


def test_only_the_window_is_searched() -> None:
    text = [1, 2, 3, *range(10, 30), 1, 2]
    assert draft_behind(text).token_ids == [3, 10, 11, 12]
    assert draft_behind(text, window=20).token_ids == []


def test_what_was_emitted_is_part_of_the_text() -> None:
    drafter = LookupDrafter(3, 100)
    sequence = DraftSequence([1, 2, 3], Sampling(), 100)
    steps = go_on(drafter, sequence, 1, [9, 1, 2], DraftSize(2))
    with pytest.raises(StopIteration) as ended:
        next(steps)
    assert ended.value.value.token_ids == [3, 9]
