"""What drafters want of a target, as a text says it for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drafter_svc.messages import wish_to
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.errors import Unavailable
from tandem.peers.replicas.compatibility import (
    feedback_of_all,
    first_that_asks,
    require_same_feedback,
    wish_from,
)
from tandem.rpc.feedback import spec_to
from tandem.speculation.feedback import NO_FEEDBACK, FeedbackWanted

NONE = common_pb2.FeedbackSpec()
TOP = common_pb2.FeedbackSpec(top=3, predicted_at=common_pb2.PREDICTED_AT_KEPT)


def later(value: int, known: common_pb2.FeedbackSpec = NONE) -> bytes:
    """A wish with a field that this version does not know."""
    return known.SerializeToString() + bytes([15 << 3, value])


def reply(spec: bytes = b"", probes: int = 0) -> drafter_pb2.GetModelInfoResponse:
    feedback = common_pb2.FeedbackSpec.FromString(spec)
    return drafter_pb2.GetModelInfoResponse(feedback=feedback, probes=probes, probe_tokens=probes)


def test_a_wish_that_only_a_later_version_knows_is_a_wish() -> None:
    wanted = wish_from(reply(later(1)))
    assert wanted is not None
    assert wanted.asks
    assert not wanted.told
    assert spec_to(wanted) is None, "a target would not know it either"


@pytest.mark.parametrize("known", [NONE, TOP])
def test_all_that_ask_ask_the_same(known: common_pb2.FeedbackSpec) -> None:
    first = reply(later(1, known), probes=2)
    assert first_that_asks([reply(), first, reply(later(2, known))]) is first
    for same in (reply(), reply(probes=7), first, reply(later(1, known))):
        require_same_feedback(first, same)
    for other in (
        later(2, known),
        later(1, common_pb2.FeedbackSpec(top=1)),
        TOP.SerializeToString(),
    ):
        with pytest.raises(Unavailable, match="reads other hidden states or predictions"):
            require_same_feedback(first, reply(other))
    assert first_that_asks([reply(), reply(probes=2)]) is None
    require_same_feedback(None, first)


def drafter(*layers: int, learns: bool = False, prompt: int = 1) -> Any:
    """A head, or a decoder without layers, called by what it is."""
    wanted = FeedbackWanted(layers, 8 * bool(layers), prompt_tokens=prompt, top=64 * learns)
    info = common_pb2.ModelInfo(model="head" if layers else "decoder", hidden_size=8)
    said = drafter_pb2.GetModelInfoResponse(info=info, learns=learns)
    wish_to(wanted, said)
    return said


OTHER_STATES = "reads other hidden states or predictions than the first one does"


@pytest.mark.parametrize(
    ("first", "other", "sentence"),
    [
        (drafter(3, learns=True), drafter(3), r"\(head\) does not learn, unlike .* set ONLINE for"),
        (drafter(3), drafter(3, learns=True), r"\(head\) learns, unlike .* set ONLINE for"),
        # Other heads, whatever ONLINE is.
        (drafter(3, learns=True), drafter(1, 2, 4, learns=True), OTHER_STATES),
        (drafter(3), drafter(1, 2, 4, learns=True), OTHER_STATES),
        (drafter(3, prompt=5), drafter(3, learns=True), OTHER_STATES),
        # A decoder that learns, and a head.
        (drafter(3), drafter(learns=True), r"\(decoder\) learns and reads no .* its ONLINE=0"),
        (
            drafter(learns=True),
            drafter(3, learns=True),
            r"\(head\) reads hidden states.*\(decoder\) learns and reads none: set ONLINE=0 there",
        ),
    ],
)
def test_what_is_said_of_one_that_asks_for_something_else(
    first: Any, other: Any, sentence: str
) -> None:
    with pytest.raises(Unavailable, match=sentence):
        require_same_feedback(first, other)


def test_a_text_has_room_for_the_most_probes_of_any() -> None:
    assert feedback_of_all([]) == NO_FEEDBACK
    said = feedback_of_all([reply(probes=2), reply(TOP.SerializeToString(), 1), reply(probes=5)])
    assert (said.top, said.probes, said.probe_tokens) == (3, 5, 5)
    assert spec_to(said) == TOP


@pytest.mark.parametrize(
    "wanted",
    [
        NO_FEEDBACK,
        FeedbackWanted(layers=(2, 0), hidden_size=8, prompt_tokens=3, made_for="ab" * 32),
        FeedbackWanted(top=64, prompt_tokens=0, probes=20, probe_tokens=4),
    ],
)
def test_a_wish_comes_as_it_was_said(wanted: FeedbackWanted) -> None:
    info = common_pb2.ModelInfo(hidden_size=wanted.hidden_size)
    said = drafter_pb2.GetModelInfoResponse(info=info)
    wish_to(wanted, said)
    assert said.HasField("feedback") == wanted.told
    assert wish_from(said) == replace(wanted, prompt_tokens=wanted.prompt_tokens * wanted.told)
