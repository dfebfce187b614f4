"""Mutated answers of a drafter and of a target, read by the orchestrator's code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from orchestrator.front.grpc.messages import _stages_to
from orchestrator.sizes.adaptive import Adaptation, AdaptiveSize
from orchestrator.sizes.goodput import sizes
from tandem.drafter.v1 import drafter_pb2
from tandem.peers.grpc.draft_call import DraftCall
from tandem.peers.grpc.verify_call import VerifyCall
from tandem.peers.text.contracts import DraftReply, News, VerdictReply
from tandem.peers.text.measures import TextTimes
from tandem.peers.text.record import TextRecord
from tandem.profile import Profile
from tandem.rpc.streams.call import SequenceCall
from tandem.rpc.streams.link import Link
from tandem.speculation.tree import DraftSize
from tandem.telemetry.stages import StageTimes
from tests.fuzz import seeds
from tests.fuzz.read.surface import MessageSurface, Violation
from tests.support.models.tiny import VOCAB_SIZE
from tests.support.wire.fakes import ANYBODY, PATIENT

_SIZE = DraftSize(3, 4)


class AnsweredCall(SequenceCall[Any, Any]):
    """A call whose peer answers whatever it is told to, to anything."""

    def __init__(self, role: str) -> None:
        link: Link[Any] = Link(role, "127.0.0.1:1", lambda: None)
        super().__init__(link, lambda requests: None, None, None, 1 << 20)
        self.answer: Any = None

    def tell(self, request: Any, answers: int = 1) -> None:
        """It does not matter what is asked."""

    async def hear(self, kind: str, seconds: float) -> Any:
        if (got := self.answer.WhichOneof("result")) != kind:
            raise self.broken(f"result must be {kind}, got {got}")
        return self.answer


class Answers(MessageSurface):
    """Whatever a peer answers is a sound answer, or the peer's failure."""

    share = 0.05

    def refusals(self) -> Sequence[str]:
        return ("INTERNAL",)  # PeerFailure: the drafter is left behind, or the text ends


class Draftings(Answers):
    """Of a drafter."""

    name = "drafted"
    seeds = seeds.DRAFTED

    async def judge(self, message: Any) -> str:
        peer = AnsweredCall("drafter")
        peer.answer = message
        call = DraftCall(peer, PATIENT, TextRecord(), 1 << 20, ANYBODY)
        call._vocab_size = VOCAB_SIZE
        drafted = await call.draft(1, 3, News([4]), _SIZE, needs_every_draft=False)
        assert drafted.gamma <= _SIZE.gamma
        assert all(0 <= token < VOCAB_SIZE for token in drafted.token_ids)
        for place in range(len(drafted.token_ids) + 1):
            drafted.path_to(place), drafted.tree.ranks_to(place), drafted.kept_first(place)
        return "OK"


class Prepareds(Answers):
    """Of a drafter that sends what it has prepared after outcomes of a round."""

    name = "prepared"
    seeds = seeds.PREPARED

    async def judge(self, message: Any) -> str:
        peer = AnsweredCall("drafter")
        peer.answer = message
        call = DraftCall(peer, PATIENT, TextRecord(), 1 << 20, ANYBODY)
        call._vocab_size = VOCAB_SIZE
        first, wanted = (
            drafter_pb2.DraftStep(
                round=round_, new_token_ids=news, gamma=_SIZE.gamma, max_nodes=_SIZE.nodes
            )
            for round_, news in ((1, [4]), (2, [2]))
        )
        call._sending = first
        found = await call._sent(wanted)
        if found is not None:
            drafted = call._checked(found[0], _SIZE, False, StageTimes())
            assert drafted.gamma <= _SIZE.gamma
            assert all(0 <= token < VOCAB_SIZE for token in drafted.token_ids)
        return "OK"


class Verdicts(Answers):
    """Of a target; what they say of chances and times is learnt from, and must not spoil sizes."""

    name = "verdict"
    seeds = seeds.VERDICTS

    async def judge(self, message: Any) -> str:
        peer = AnsweredCall("target")
        peer.answer = message
        call = VerifyCall(peer, PATIENT, TextRecord(), ANYBODY)
        call._vocab_size = VOCAB_SIZE
        draft = seeds.CHAINS[2]
        drafted = DraftReply(list(draft.token_ids), None, draft, 60, StageTimes())
        decided = await call.verify(1, 4, drafted)
        assert 0 <= decided.num_accepted <= 3
        assert 0 <= decided.next_token < VOCAB_SIZE
        _require_unspoilt(message, drafted, decided)
        return "OK"


class RunVerdicts(Answers):
    """Of a target that does rounds by itself: what it drafted, and what it decided."""

    name = "ran"
    seeds = seeds.RAN

    async def judge(self, message: Any) -> str:
        peer = AnsweredCall("target")
        peer.answer = message
        call = VerifyCall(peer, PATIENT, TextRecord(), ANYBODY)
        call._vocab_size = VOCAB_SIZE
        call._asked.append(_SIZE)
        drafted, decided = await call.next_round(1, 4)
        nodes = 0 if drafted is None else len(drafted.token_ids)
        assert len(decided.overlaps) == nodes <= _SIZE.nodes
        assert 0 <= decided.next_token < VOCAB_SIZE
        if drafted is not None:
            assert drafted.gamma <= _SIZE.gamma
            kept = drafted.path_to(decided.place)
            assert len(kept) == decided.num_accepted
            assert all(0 <= token < VOCAB_SIZE for token in kept)
            _require_unspoilt(message, drafted, decided)
        return "OK"


def _require_unspoilt(message: Any, drafted: DraftReply, decided: VerdictReply) -> None:
    """What texts learn from an answer leaves numbers to go on with, and to end with."""
    times = TextTimes()
    for _ in range(3):
        times.start_round()
        times.add_decided(decided.times, drafted.times)
    _stages_to(times)
    everyone = Adaptation(lambda: 1, Profile(), Profile())
    policy = AdaptiveSize(everyone, sizes(3, 0, None, None))
    for _ in range(3):
        policy.choose(100)
        policy.observe(drafted, decided)
    expected = everyone.expected(policy.choose(100).size, everyone.acceptance.chances(3))
    if not (math.isfinite(expected.tokens) and 0 < expected.wall_ns < math.inf):
        raise Violation(message.SerializeToString(), f"{expected} of a round")
