"""A draft crosses the wire bit for bit, and is checked before it is trusted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tandem.common.v1 import common_pb2
from tandem.errors import InvalidRequest, Unsupported
from tandem.rpc.messages import draft_from, draft_to
from tandem.speculation.categorical import MAX_WEIGHT, Categorical
from tandem.speculation.distribution import quantize
from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal


def categorical(ids: list[int], weights: list[int]) -> Categorical:
    return Categorical(np.array(ids, np.uint32), np.array(weights, np.uint16))


def test_quantize_keeps_the_smallest_set_that_covers_the_mass() -> None:
    row = quantize(torch.tensor([0.05, 0.5, 0.15, 0.3]), mass=0.9, support=4)
    assert row.ids.tolist() == [1, 3, 2]
    assert row.weights[0] == MAX_WEIGHT
    assert row.weights[1] == round(0.3 / 0.5 * MAX_WEIGHT)


def test_quantize_keeps_at_most_the_support_and_drops_zeros() -> None:
    assert quantize(torch.tensor([0.1, 0.2, 0.3, 0.4]), 1.0, 2).ids.tolist() == [3, 2]
    assert quantize(torch.tensor([1.0, 1e-9, 0.0]), 1.0, 3).ids.tolist() == [0]


def test_support_0_keeps_the_full_vocabulary() -> None:
    probs = torch.softmax(torch.randn(300, generator=torch.Generator().manual_seed(0)), 0)
    assert len(quantize(probs, 0.5, 0).ids) == 300


def test_draw_has_exactly_the_law_that_is_sent() -> None:
    """The 64-bit numbers that give a token are a share weight / sum of all, to within one."""
    row = categorical([7, 3, 9], [65535, 1, 40000])
    total = int(row.weights.sum(dtype=np.int64))
    edges = [0, 65535, 65536, total]
    for token, low, high in zip(row.ids.tolist(), edges, edges[1:], strict=False):
        first, last = -(-low * 2**64 // total), -(-high * 2**64 // total) - 1
        assert row.draw(first) == token
        assert row.draw(last) == token


def test_a_draft_survives_the_wire_bit_for_bit() -> None:
    draft = Draft.from_rows(
        [2, 4, 1],
        [
            categorical([2, 0], [65535, 9]),
            categorical([4], [65535]),
            categorical([0, 1, 3], [1, 65535, 777]),
        ],
    )
    assert draft.support_sizes.tolist() == [2, 0, 3]
    received = draft_from(common_pb2.Draft.FromString(draft_to(draft).SerializeToString()), 5, 8)
    sent, rebuilt = Proposal.from_drafts([draft]), Proposal.from_drafts([received])
    assert torch.equal(sent.dense(5, torch.float64), rebuilt.dense(5, torch.float64))
    assert torch.equal(sent.tokens, rebuilt.tokens)


def test_padding_adds_no_mass() -> None:
    """Short rows and short drafts are padded with id 0, which must stay as unlikely as it is."""
    drafts = [
        Draft.from_rows([1], [categorical([1, 2], [65535, 65535])]),
        Draft.from_rows([3, 2], [categorical([3, 2, 1], [65535, 1, 1]), categorical([2], [9])]),
    ]
    dense = Proposal.from_drafts(drafts).dense(4, torch.float64)
    assert dense[0, 0].tolist() == [0, 0.5, 0.5, 0]
    assert dense[0, 1].sum() == 0
    assert dense[1, 1].tolist() == [0, 0, 1, 0]


def good() -> common_pb2.Draft:
    return draft_to(
        Draft.from_rows([2, 4], [categorical([2, 0], [65535, 9]), categorical([4, 3], [65535, 5])])
    )


def set_field(name: str, value: object) -> Callable[[common_pb2.Draft], None]:
    def change(draft: common_pb2.Draft) -> None:
        draft.ClearField(name)  # type: ignore[arg-type]
        draft.MergeFrom(common_pb2.Draft(**{name: value}))  # type: ignore[arg-type]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_field("token_ids", [3, 4]), "outside its row's support"),
        (set_field("token_ids", [2, 4, 1]), "support_sizes"),
        (set_field("token_ids", [2, 5]), "vocabulary"),
        (set_field("support_sizes", [2, 1]), "support_ids"),
        (set_field("support_sizes", [3, 1]), "outside its row's support"),
        (set_field("support_sizes", [2, 2**31]), "support_ids"),
        (set_field("support_ids", b"\x02\0\0\0\0\0\0\0\x04\0\0\0\x05\0\0\0"), "vocabulary"),
        (set_field("support_ids", b"\x02\0\0\0\x02\0\0\0\x04\0\0\0\x03\0\0\0"), "twice"),
        (set_field("support_ids", b"\x02\0\0"), "whole numbers"),
        (set_field("weights", b"\xff\xff\x09\0\xff\xff"), "weights"),
        (set_field("weights", b"\xff\xff\0\0\xff\xff\x05\0"), "weight of 0"),
        (set_field("weights", b"\0" * 8), "weight of 0"),
    ],
)
def test_a_bad_draft_is_refused(change: Callable[[common_pb2.Draft], None], message: str) -> None:
    draft = good()
    draft_from(draft, 5, 2)
    change(draft)
    with pytest.raises(InvalidRequest, match=message):
        draft_from(draft, 5, 8)


def test_too_long_a_draft_and_a_tree_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="the limit is 1"):
        draft_from(good(), 5, 1)
    tree = good()
    tree.parents.extend([-1, -1])
    with pytest.raises(Unsupported, match="parents"):
        draft_from(tree, 5, 8)
