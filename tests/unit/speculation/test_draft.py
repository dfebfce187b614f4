"""A draft crosses the wire bit for bit, and is checked before it is trusted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tandem.common.v1 import common_pb2
from tandem.engine.asks import ToHost
from tandem.engine.numbers.home import drafts_of
from tandem.errors import InvalidRequest
from tandem.inference.feed import DrawnToken, Draws
from tandem.rpc.messages import draft_from, draft_to
from tandem.speculation.categorical import MAX_WEIGHT, Categorical
from tandem.speculation.distribution import process
from tandem.speculation.draft import Draft
from tandem.speculation.proposal import Proposal
from tandem.speculation.request.sampling import Sampling
from tandem.verification.kernels.faults import faults


def draft_of(token_ids: list[int], rows: list[dict[int, int]]) -> Draft:
    """A draft from rows of token id to weight."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    weights = np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], weights[i, : len(row)] = list(row), list(row.values())
    (draft,) = Draft.batch(np.array(token_ids), ids, weights, [len(rows)])
    assert draft is not None
    return draft


def digits_of(number: int) -> torch.Tensor:
    """A 64-bit number as `Categorical.draw` takes it."""
    return torch.tensor([[number & 0xFFFFFFFF, number >> 32]])


def quantize(probs: list[float], mass: float, support: int) -> dict[int, int]:
    """One row, as token id to weight."""
    row = Categorical.quantize(torch.tensor([probs]), mass, support)
    entries = zip(row.ids[0].tolist(), row.weights[0].tolist(), strict=True)
    return {token: weight for token, weight in entries if weight}


def test_quantize_keeps_the_smallest_set_that_covers_the_mass() -> None:
    row = quantize([0.05, 0.5, 0.15, 0.3], mass=0.9, support=4)
    assert list(row) == [1, 3, 2]
    assert row[1] == MAX_WEIGHT
    assert row[3] == round(0.3 / 0.5 * MAX_WEIGHT)


def test_quantize_keeps_at_most_the_support_and_drops_zeros() -> None:
    assert list(quantize([0.1, 0.2, 0.3, 0.4], 1.0, 2)) == [3, 2]
    assert list(quantize([1.0, 1e-9, 0.0], 1.0, 3)) == [0]


def test_support_0_keeps_the_full_vocabulary() -> None:
    probs = torch.softmax(torch.randn(300, generator=torch.Generator().manual_seed(0)), 0)
    assert len(quantize(probs.tolist(), 0.5, 0)) == 300


def test_argmax_is_the_row_of_temperature_0() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -torch.inf], [0.0, -1.0, 5.0, 2.0]])
    probs = process(logits, [Sampling(temperature=0)])
    expected, found = Categorical.quantize(probs, 0.9, 1), Categorical.argmax(logits)
    assert torch.equal(found.ids, expected.ids)
    assert torch.equal(found.weights, expected.weights)
    assert Categorical.argmax(torch.tensor([[1.0, torch.nan]])).weights.tolist() == [[0]]


def test_a_row_does_not_depend_on_its_batch() -> None:
    probs = torch.softmax(torch.randn(4, 50, generator=torch.Generator().manual_seed(0)), -1)
    batch = Categorical.quantize(probs, 0.8, 20)
    for b in range(4):
        alone = Categorical.quantize(probs[b : b + 1], 0.8, 20)
        assert torch.equal(alone.ids[0], batch.ids[b])
        assert torch.equal(alone.weights[0], batch.weights[b])


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("others", [0, 40_000])
def test_draw_has_exactly_the_law_that_is_sent(padding: int, others: int) -> None:
    """The 64-bit numbers that give a token are a share weight / sum of all, to within one.

    Also where the sum exceeds 31 bits, as a full row's may.
    """
    weights = [65535, 1, 40000] + [65535] * others
    row = Categorical(
        torch.tensor([[7, 3, 9, *range(10, 10 + others)] + [0] * padding]),
        torch.tensor([weights + [0] * padding]),
    )
    edges = [0, *np.cumsum(weights[:3]).tolist()]
    total = sum(weights)
    for token, low, high in zip([7, 3, 9], edges, edges[1:], strict=False):
        first, last = -(-low * 2**64 // total), -(-high * 2**64 // total) - 1
        assert row.draw(digits_of(first)).tolist() == [token]
        assert row.draw(digits_of(last)).tolist() == [token]


def test_a_row_that_is_no_number_fails_its_own_draft_alone() -> None:
    """Its batch goes on: no index is out of range."""
    probs = torch.tensor([[torch.nan] * 4, [0.1, 0.2, 0.3, 0.4]])
    rows = Categorical.quantize(probs, 0.999, 3)
    draws = Draws(rows.draw(digits_of(2**63).expand(2, 2)), rows)
    broken, sound = drafts_of([ToHost([DrawnToken(draws, b)]) for b in range(2)])
    assert broken is None
    assert isinstance(sound, Draft)
    assert sound.token_ids == [2]


def test_what_was_drawn_before_a_broken_row_is_not_withdrawn() -> None:
    """Leaving it out for what came after it would bias the text."""
    ids = np.arange(3)[None].repeat(5, 0)
    weights = np.full((5, 3), 7)
    weights[[2, 3]] = 0
    first, second, third = Draft.batch(np.array([0, 1, 2, 0, 1]), ids, weights, [3, 1, 1])
    assert first is not None
    assert (first.token_ids, first.sizes, len(first.ids)) == ([0, 1], [3, 3], 6)
    assert second is None
    assert third is not None
    assert third.token_ids == [1]


def test_a_draft_survives_the_wire_bit_for_bit() -> None:
    draft = draft_of([2, 4, 1], [{2: 65535, 0: 9}, {4: 65535}, {0: 1, 1: 65535, 3: 777}])
    assert draft.sizes == [2, 0, 3]
    received = draft_from(common_pb2.Draft.FromString(draft_to(draft).SerializeToString()), 5, 8)
    sent, rebuilt = Proposal.from_drafts([draft]), Proposal.from_drafts([received])
    assert torch.equal(sent.dense(5, torch.float64), rebuilt.dense(5, torch.float64))
    assert torch.equal(sent.tokens, rebuilt.tokens)


def test_padding_adds_no_mass() -> None:
    """Short rows and short drafts are padded with id 0, which must stay as unlikely as it is."""
    drafts = [
        draft_of([1], [{1: 65535, 2: 65535}]),
        Draft.certain(()),
        draft_of([3, 2], [{3: 65535, 2: 1, 1: 1}, {2: 9}]),
    ]
    proposal = Proposal.from_drafts(drafts)
    dense = proposal.dense(4, torch.float64)
    assert dense[0, 0].tolist() == [0, 0.5, 0.5, 0]
    assert dense[0, 1].sum() == 0
    assert dense[1].sum() == 0
    assert dense[2, 0, 3] == 65535 / 65537
    assert dense[2, 1].tolist() == [0, 0, 1, 0]
    assert proposal.tokens.tolist() == [[1, 0], [0, 0], [3, 2]]
    assert proposal.lengths.tolist() == [1, 0, 2]


def good() -> common_pb2.Draft:
    return draft_to(draft_of([2, 4], [{2: 65535, 0: 9}, {4: 65535, 3: 5}]))


def set_field(name: str, value: object) -> Callable[[common_pb2.Draft], None]:
    """Change a field of the draft, or of its rows."""

    def change(draft: common_pb2.Draft) -> None:
        message: Any = draft.rows if name in ("sizes", "ids", "weights") else draft
        message.ClearField(name)
        message.MergeFrom(type(message)(**{name: value}))

    return change


def check(message: common_pb2.Draft, vocab_size: int, max_gamma: int) -> None:
    """As a target does: the shape at once, the rows with those of its batch."""
    sound = draft_of([0], [{0: 65535, 1: 9}])
    found = faults([sound, draft_from(message, vocab_size, max_gamma), sound], vocab_size)
    if found:
        assert list(found) == [1], "nobody else's"
        raise InvalidRequest(found[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_field("token_ids", [3, 4]), "outside its row"),
        (set_field("token_ids", [2, 4, 1]), "rows.sizes holds 2 rows for 3"),
        (set_field("token_ids", [2, 5]), "vocabulary"),
        (set_field("sizes", [2, 1]), "rows.ids"),
        (set_field("sizes", [3, 1]), "outside its row"),
        (set_field("sizes", [2, 2**31]), "rows.ids"),
        (set_field("ids", b"\x02\0\0\0\0\0\0\0\x04\0\0\0\x05\0\0\0"), "vocabulary"),
        (set_field("ids", b"\x02\0\0\0\x02\0\0\0\x04\0\0\0\x03\0\0\0"), "twice"),
        (set_field("ids", b"\x02\0\0"), "whole numbers"),
        (set_field("weights", b"\xff\xff\x09\0\xff\xff"), "weights"),
        (set_field("weights", b"\xff\xff\0\0\xff\xff\x05\0"), "weight of 0"),
        (set_field("weights", b"\0" * 8), "weight of 0"),
        (set_field("sizes", [2, 2, 0]), "a row that no token names"),
        (set_field("sizes", []), "rows.sizes holds 0 rows"),
        (set_field("parents", [0]), "draft.parents holds 1 places for 2"),
        (set_field("parents", [1, 1]), r"draft.parents\[0\] = 1 does not come before"),
        (set_field("row_of", [0]), "draft.row_of holds 1 rows for 2"),
        (set_field("row_of", [0, 2]), "draft.row_of names row 2 of 2"),
        (set_field("row_of", [0, 0]), "row 1, which no token names"),
    ],
)
def test_a_bad_draft_is_refused(change: Callable[[common_pb2.Draft], None], message: str) -> None:
    draft = good()
    check(draft, 5, 2)
    change(draft)
    with pytest.raises(InvalidRequest, match=message):
        check(draft, 5, 8)


def test_a_draft_has_limits() -> None:
    with pytest.raises(InvalidRequest, match="holds 2 tokens, the limit is 1"):
        draft_from(good(), 5, 1)
    tree = good()
    set_field("parents", [0, 0])(tree)
    with pytest.raises(InvalidRequest, match=r"draft.parents: open announced no max_nodes"):
        draft_from(tree, 5, 8)
    assert draft_from(tree, 5, 1, 2).places() == [0, 0]
    with pytest.raises(InvalidRequest, match="holds 2 tokens, the limit is 1"):
        draft_from(tree, 5, 8, 1)
    with pytest.raises(InvalidRequest, match=r"draft.token_ids holds 2 tokens, the limit is 1"):
        draft_from(good(), 5, 1, 2)


def test_a_chain_may_say_that_it_is_one() -> None:
    draft = good()
    draft.parents.extend([0, 1])
    draft.row_of.extend([0, 1])
    check(draft, 5, 8)


def test_what_is_sent_without_rows_is_certain() -> None:
    draft = draft_from(common_pb2.Draft(token_ids=[3, 1]), 5, 8)
    assert Proposal.from_drafts([draft]).dense(5, torch.float32).argmax(-1).tolist() == [[3, 1]]


def test_a_bad_draft_has_none_but_itself_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batch would pay for it: 64 trees of 64 nodes by 32 ms."""
    good = draft_of([1], [{1: 9, 2: 65535}])
    bad = Draft([1], [2], np.array([1, 2], np.uint32), np.array([9, 0], np.uint16))
    looked_through: list[Draft] = []
    fault = Draft.fault_of_rows

    def counted(draft: Draft, vocab_size: int) -> str:
        looked_through.append(draft)
        return fault(draft, vocab_size)

    monkeypatch.setattr(Draft, "fault_of_rows", counted)
    batch = [good, bad, good, Draft.certain([1]), good, bad, good]
    assert set(faults(batch, 5)) == {1, 5}
    assert len(looked_through) == 2
    assert all(draft is bad for draft in looked_through)
