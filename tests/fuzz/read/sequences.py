"""Mutated dialogues of one sequence, answered by the drafter's and the target's code."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from drafter_svc.sequence import DraftedSequence
from tandem.common.v1 import common_pb2
from tandem.drafter.v1 import drafter_pb2
from tandem.drafting.lookups.lookup import LookupDrafter
from tandem.engine.admission import AdmissionLimits
from tandem.rpc.streams.sequence import ServedSequence, State
from tandem.rpc.streams.server import MAX_REQUESTS
from tandem.shaping.grammar import Grammars
from tandem.target.v1 import target_pb2
from target_svc.drafts import OwnDrafts
from target_svc.sequence import VerifiedSequence
from tests.fuzz import seeds
from tests.fuzz.read.surface import MessageSurface, Violation
from tests.support.laws.shaping import tokenizer_json
from tests.support.models.engines import emptied
from tests.support.models.tiny import (
    VOCAB_SIZE,
    DrafterEngine,
    TargetEngine,
    make_method,
    make_target,
    random_llama,
)
from tests.support.waiting import HANG_SECONDS

# One that waits for a place would wait for a leak.
_PLACES = AdmissionLimits(max_sequences=2, max_waiting=1, wait_seconds=0.05)
_GRAMMARS = Grammars(tokenizer_json, VOCAB_SIZE, ())
_INFO = common_pb2.ModelInfo(
    vocab_size=VOCAB_SIZE,
    max_length=seeds.MAX_LENGTH,
    max_gamma=seeds.MAX_GAMMA,
    max_nodes=seeds.MAX_NODES,
    fingerprint="f",
    incarnation=1,
)


_OWN = target_pb2.TargetDrafts(
    drafter="lookup", max_gamma=seeds.MAX_GAMMA, max_length=seeds.MAX_LENGTH
)


class Sequences(MessageSurface):
    """Answers the requests of a message one by one, as those of one sequence; then it is over.

    Beside each of them an honest sequence goes on, whose answers stay what they are alone.
    """

    share = 0.01
    engine: TargetEngine | DrafterEngine
    make: Callable[[], ServedSequence[Any, Any]]

    async def start(self) -> None:
        self.engine = self._engine()
        self.engine.start()
        self._alone = await self._speak(self.seeds[0])

    async def stop(self) -> None:
        await asyncio.to_thread(self.engine.stop)

    @abstractmethod
    def _engine(self) -> TargetEngine | DrafterEngine:
        """One with few places."""

    async def judge(self, message: Any) -> str:
        if len(message.requests) > MAX_REQUESTS:
            return "INVALID_ARGUMENT"
        honest = asyncio.create_task(self._speak(self.seeds[0]))
        try:
            await self._speak(message)
        finally:
            beside = (await asyncio.gather(honest, return_exceptions=True))[0]
            await self._require_empty(message)
            if beside != self._alone:
                raise Violation(message.SerializeToString(), f"an honest one was told {beside}")
        return "OK"

    def refusals(self) -> Sequence[str]:
        """There is a place for each of the two."""
        return [name for name in super().refusals() if name != "RESOURCE_EXHAUSTED"]

    async def _speak(self, message: Any) -> list[Any]:
        """What a sequence of these requests is answered."""
        sequence, answers = self.make(), []
        sequence.say = lambda answer: answers.append(said(answer))
        try:
            for request in message.requests:
                if (reply := await sequence.handle(request)) is not None:
                    answers.append(said(reply.message))
                if sequence.state is State.CLOSED:
                    break
        finally:
            sequence.release()
        return answers

    async def _require_empty(self, message: Message) -> None:
        admission = self.engine.admission
        if admission.open_sequences or admission.waiting:
            left = f"{admission.open_sequences} open, {admission.waiting} waiting"
            raise Violation(message.SerializeToString(), left)
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await emptied(self.engine)
        except TimeoutError:
            raise Violation(message.SerializeToString(), "memory stays reserved") from None


def said(answer: Any) -> Any:
    """What an answer says, but for times, and for weights, whose rounding may hang on the batch."""
    body = getattr(answer, answer.WhichOneof("result"))
    for name in ("times", "draft_times", "open_sequences", "incarnation"):
        if name in body.DESCRIPTOR.fields_by_name:
            body.ClearField(name)
    if answer.WhichOneof("result") == "drafted" and body.draft.HasField("rows"):
        body.draft.rows.ClearField("weights")
    return body


class VerifySequences(Sequences):
    """A target's, which also drafts."""

    name = "verify"
    seeds = tuple(target_pb2.VerifyRequest(requests=each) for each in seeds.VERIFY_DIALOGUES)

    def _engine(self) -> TargetEngine:
        engine = make_target(random_llama(1), places=_PLACES)
        own = OwnDrafts(LookupDrafter(3, 64), _OWN, VOCAB_SIZE)
        self.make = lambda: VerifiedSequence(
            engine, engine.decoder, _INFO, seeds.MAX_ROUNDS, _GRAMMARS, own
        )
        return engine


class DraftSequences(Sequences):
    """A drafter's, of trees: its steps take all that those of chains take."""

    name = "drafting"
    seeds = tuple(drafter_pb2.DraftRequest(requests=each) for each in seeds.DRAFT_DIALOGUES)

    def _engine(self) -> DrafterEngine:
        engine = make_method("tree")
        engine.admission.limits = _PLACES
        self.make = lambda: DraftedSequence(engine, engine.drafter, _INFO, _GRAMMARS)
        return engine
