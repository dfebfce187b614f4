"""Drafts that are trees cross the wire, and are checked before they are trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tandem.common.v1 import common_pb2
from tandem.errors import InvalidRequest
from tandem.rpc.messages import draft_from, draft_to
from tandem.speculation.draft import Draft
from tandem.speculation.tree import DraftShape
from tandem.verification.kernels.faults import faults


def made(
    token_ids: list[int],
    rows: list[dict[int, int]],
    *,
    parents: list[int] | None,
    row_of: list[int] | None,
    distinct: bool,
) -> Draft:
    """A draft from rows of token id to weight."""
    ids = np.array([token for row in rows for token in row], np.uint32)
    weights = np.array([weight for row in rows for weight in row.values()], np.uint16)
    return Draft(token_ids, [len(row) for row in rows], ids, weights, parents, row_of, distinct)


def setting(name: str, value: object) -> Callable[[common_pb2.Draft], None]:
    def change(draft: common_pb2.Draft) -> None:
        draft.ClearField(name)  # type: ignore[arg-type]
        fields: dict[str, Any] = {name: value}
        draft.MergeFrom(common_pb2.Draft(**fields))

    return change


def tree() -> common_pb2.Draft:
    """Two siblings that share a row, a child of the second, and a certain one."""
    rows = [{2: 65535, 0: 9, 1: 3}, {4: 65535, 3: 5}, {1: 65535}]
    draft = made([2, 0, 4, 1], rows, parents=[0, 0, 2, 1], row_of=[0, 0, 1, 2], distinct=True)
    return draft_to(draft)


def test_a_tree_comes_as_it_was_sent() -> None:
    draft = draft_from(common_pb2.Draft.FromString(tree().SerializeToString()), 5, 8, 4)
    assert draft.places() == [0, 0, 2, 1]
    assert draft.rows_of_nodes() == [0, 0, 1, 2]
    assert draft.distinct
    assert draft.depth == 2
    assert faults([draft], 5) == {}
    assert draft.left_by_siblings() == [1.0, 12 / 65547, 1.0, 1.0]
    assert draft.path_to(3) == [2, 3]


def check(message: common_pb2.Draft) -> None:
    """As a target does."""
    if found := faults([draft_from(message, 5, 8, 4)], 5):
        raise InvalidRequest(found[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setting("token_ids", [2, 2, 4, 1]), r"token_ids\[1\] = 2 repeats one of its distinct"),
        (setting("token_ids", [2, 4, 4, 1]), r"token_ids\[1\] = 4 is outside its row"),
        (setting("row_of", [0, 0, 2, 2]), "row 1, which no token names"),
        (setting("row_of", [2, 0, 1, 2]), r"row_of\[3\] = 2 is a certain row of another"),
    ],
)
def test_a_bad_tree_is_refused(change: Callable[[common_pb2.Draft], None], message: str) -> None:
    draft = tree()
    draft.rows.sizes[2:] = [0]
    draft.rows.ids, draft.rows.weights = draft.rows.ids[:20], draft.rows.weights[:10]
    check(draft)
    change(draft)
    with pytest.raises(InvalidRequest, match=message):
        check(draft)


def test_nothing_hangs_behind_a_twin() -> None:
    draft = tree()
    draft.distinct_siblings = False
    setting("token_ids", [2, 2, 4, 1])(draft)
    with pytest.raises(InvalidRequest, match=r"parents\[2\] = 2 is after a repeated sibling"):
        draft_from(draft, 5, 8, 4)
    setting("parents", [0, 0, 1, 1])(draft)
    twins = draft_from(draft, 5, 8, 4)
    assert twins.homes() == [1, 1, 3, 4]
    assert twins.row_of_places() == [0, 1, 1, 2, 3]


@pytest.mark.parametrize(
    ("parents", "row_of", "distinct", "takes", "sentence"),
    [
        ([0, 0, 2, 1], [0, 0, 1, 2], True, DraftShape.TREE, ""),
        ([0, 0, 2, 1], [0, 0, 1, 2], True, DraftShape.CHAIN, "takes chains"),
        ([0, 0, 2, 1], [0, 0, 1, 2], True, DraftShape.IID_CHAINS, "takes independent chains"),
        ([0, 0, 2, 1], [0, 0, 1, 2], False, DraftShape.IID_CHAINS, ""),
        ([0, 0, 2, 1], [0, 2, 1, 2], False, DraftShape.IID_CHAINS, r"row_of[1] = 2: draws at one"),
        ([0, 0, 2, 2], [0, 0, 1, 1], False, DraftShape.IID_CHAINS, "2 draws at place 2, which 1"),
        (None, None, False, DraftShape.CHAIN, ""),
        (None, None, False, DraftShape.IID_CHAINS, ""),
    ],
)
def test_a_rule_takes_drafts_of_its_shape(
    parents: list[int] | None,
    row_of: list[int] | None,
    distinct: bool,
    takes: DraftShape,
    sentence: str,
) -> None:
    rows = [{token: 65535} for token in range(4 if row_of is None else max(row_of) + 1)]
    draft = made([2, 0, 4, 1], rows, parents=parents, row_of=row_of, distinct=distinct)
    found = draft.misfit(takes)
    assert sentence in found
    assert bool(found) == bool(sentence)
