"""What a text asks of a drafter that sends prepared drafts, and what it makes of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.errors import PeerFailure
from tandem.peers.grpc.calls import CountingOn
from tandem.peers.grpc.draft_call import DraftCall
from tandem.peers.text.contracts import AheadWay, DraftReply, News
from tandem.peers.text.record import TextRecord
from tandem.rpc.streams.call import SequenceCall
from tandem.rpc.streams.link import Link
from tandem.speculation.feedback import FeedbackWanted
from tandem.speculation.tree import DraftSize
from tests.support.wire.fakes import PATIENT

SIZE = DraftSize(2)
Response = drafter_pb2.SequenceResponse


class Peer(SequenceCall[Any, Any]):
    """A drafter whose answers are given beforehand.

    Attributes:
        told: steps, each with the number of its answers.
        answers: that come, in order.
        there: how many of them have come already.
    """

    def __init__(self) -> None:
        link: Link[Any] = Link("drafter", "127.0.0.1:1", lambda: None)
        super().__init__(link, lambda requests: None, None, None, 1 << 20)
        self.told: list[tuple[drafter_pb2.DraftStep, int]] = []
        self.answers: deque[Response] = deque()
        self.there = 0

    def tell(self, request: Any, answers: int = 1) -> None:
        step = drafter_pb2.DraftStep()
        step.CopyFrom(request.draft)
        self.told.append((step, answers))

    def heard(self) -> bool:
        return self.there > 0

    async def hear(self, kind: str, seconds: float) -> Response:
        answer = self.answers.popleft()
        self.there = max(self.there - 1, 0)
        assert answer.WhichOneof("result") == kind
        return answer


def drafted(round_: int, position: int, token_ids: Sequence[int]) -> Response:
    step = drafter_pb2.DraftedStep(round=round_, position=position)
    step.draft.token_ids.extend(token_ids)
    return Response(drafted=step)


def prepared(round_: int, *outcomes: Sequence[int]) -> Response:
    """Drafts of 8 and 9 after each outcome."""
    draft = common_pb2.Draft(token_ids=[8, 9])
    message = drafter_pb2.PreparedDrafts(round=round_)
    for outcome in outcomes:
        message.drafts.add(new_token_ids=outcome, draft=draft)
    return Response(prepared=message)


def calling(prepares: bool = True, **traits: Any) -> tuple[Peer, DraftCall]:
    peer = Peer()
    replica = CountingOn("", lambda _: None, prepares=prepares, **traits)
    call = DraftCall(peer, PATIENT, TextRecord(), 1 << 20, replica)
    call._vocab_size = 100
    return peer, call


async def ask(
    call: DraftCall,
    round_: int,
    position: int,
    news: Sequence[int],
    size: DraftSize = SIZE,
    way: AheadWay = AheadWay.SENT,
) -> DraftReply:
    return await call.draft(round_, position, News(news), size, False, way)


async def asked_once(peer: Peer, call: DraftCall, *outcomes: Sequence[int], there: int) -> None:
    """One round, and what was prepared after it."""
    peer.answers += [drafted(1, 4, [5, 6]), prepared(1, *outcomes)]
    await ask(call, 1, 3, [4])
    peer.there = there


async def test_a_draft_that_is_there_is_taken_and_the_drafter_told() -> None:
    peer, call = calling()
    await asked_once(peer, call, [5, 7], [5, 6, 7], there=1)
    taken = await ask(call, 2, 4, [5, 6, 7])
    assert list(taken.token_ids) == [8, 9]
    (first, of_first), (step, of_second) = peer.told
    assert (first.ahead, first.send_ahead, first.taken, of_first) == (True, True, False, 2)
    assert (step.taken, step.send_ahead, of_second) == (True, True, 1)
    assert list(step.new_token_ids) == [5, 6, 7]
    assert not peer.answers
    # After it comes another one, or one that is asked for in another way.
    peer.answers.append(prepared(2, [8, 1]))
    peer.there = 1
    await ask(call, 3, 7, [8, 1], way=AheadWay.NOTHING)
    assert (peer.told[-1][0].taken, peer.told[-1][1]) == (True, 0)


async def test_drafts_that_come_too_late_are_passed_over() -> None:
    peer, call = calling()
    await asked_once(peer, call, [5, 7], there=0)
    peer.answers += [drafted(2, 6, [1, 2]), prepared(2)]
    found = await ask(call, 2, 4, [5, 7])
    assert list(found.token_ids) == [1, 2]
    assert [step.taken for step, _ in peer.told] == [False, False]
    assert len(peer.answers) == 1


@pytest.mark.parametrize(
    ("round_", "news", "size"),
    [
        (2, [5, 6], SIZE),  # an outcome that was not prepared
        (3, [5, 7], SIZE),  # a round was skipped
        (2, [5, 7], DraftSize(1)),
    ],
)
async def test_drafts_of_another_outcome_round_or_size_are_not_taken(
    round_: int, news: list[int], size: DraftSize
) -> None:
    peer, call = calling()
    await asked_once(peer, call, [5, 7], there=1)
    peer.answers += [drafted(round_, 6, [1])]
    found = await ask(call, round_, 4, news, size)
    assert list(found.token_ids) == [1]
    assert not peer.told[-1][0].taken


@pytest.mark.parametrize("learns", [True, False])
async def test_feedback_makes_drafts_out_of_date_unless_it_is_for_learning_alone(
    learns: bool,
) -> None:
    peer, call = calling(learns=learns, feedback=FeedbackWanted(top=1))
    await asked_once(peer, call, [5, 7], there=1)
    if not learns:
        peer.answers.append(drafted(2, 6, [1]))
    news = News([5, 7], [common_pb2.Feedback(round=1, predicted_ids=[6])])
    found = await call.draft(2, 4, news, SIZE, False)
    assert list(found.token_ids) == ([8, 9] if learns else [1])
    step, _ = peer.told[-1]
    assert (step.taken, len(step.feedback)) == (learns, 1)
    assert not peer.answers


@pytest.mark.parametrize(
    ("round_", "outcomes"),
    [
        (2, [[5, 7]]),
        (1, [[5, 7], [5, 7]]),
        (1, [[]]),
        (1, [[5, 6, 7, 8]]),
        (1, [[5, 100]]),
    ],
)
async def test_drafts_that_cannot_be_those_of_the_round_lose_the_drafter(
    round_: int, outcomes: list[list[int]]
) -> None:
    peer, call = calling()
    peer.answers += [drafted(1, 4, [5, 6]), prepared(round_, *outcomes)]
    await ask(call, 1, 3, [4])
    peer.there = 1
    with pytest.raises(PeerFailure, match="prepared"):
        await ask(call, 2, 4, [5, 7])


async def test_a_draft_that_is_taken_is_checked_as_any_other() -> None:
    peer, call = calling()
    long = prepared(1, [5, 7])
    long.prepared.drafts[0].draft.token_ids.append(1)
    peer.answers += [drafted(1, 4, [5, 6]), long]
    await ask(call, 1, 3, [4])
    peer.there = 1
    with pytest.raises(PeerFailure, match="draft"):
        await ask(call, 2, 4, [5, 7])


async def test_a_drafter_that_prepares_nothing_is_not_asked_to() -> None:
    peer, call = calling(prepares=False)
    peer.answers.append(drafted(1, 4, [5, 6]))
    await ask(call, 1, 3, [4])
    ((step, answers),) = peer.told
    assert (step.ahead, step.send_ahead, answers) == (False, False, 1)
    plain = drafter_pb2.DraftStep(round=1, position=3, new_token_ids=[4], gamma=2)
    assert step.SerializeToString() == plain.SerializeToString()
