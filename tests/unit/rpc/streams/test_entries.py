"""Entries of a stream's messages, encoded by hand."""

from __future__ import annotations

import pytest

from tandem.drafter.v1 import drafter_pb2
from tandem.rpc.streams.entries import listed
from tandem.target.v1 import target_pb2


@pytest.mark.parametrize("tokens", [0, 1, 100, 127, 128, 5_000, 20_000])
def test_an_entry_is_listed_as_the_library_lists_it(tokens: int) -> None:
    """Lengths of one, two and three bytes."""
    answer = target_pb2.SequenceResponse(sequence=3)
    answer.verdict.drafted.token_ids.extend([1] * tokens)
    whole = target_pb2.VerifyResponse(responses=[answer])
    assert listed(answer.SerializeToString()) == whole.SerializeToString()


def test_both_services_list_their_answers_in_the_same_field() -> None:
    for message in (target_pb2.VerifyResponse, drafter_pb2.DraftResponse):
        assert message.DESCRIPTOR.fields_by_name["responses"].number == 1
