"""Drafts that a target makes itself, in the process that verifies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.drafting.drafter import Drafter, DraftSequence, go_on
from tandem.engine.answers import Decision, DeviceVerdict
from tandem.engine.asks import Lap, Steps, ToHost
from tandem.engine.numbers.draws import not_finite
from tandem.engine.scorer import Scorer
from tandem.inference.feed import DrawnToken, Resumed
from tandem.inference.kv.viewed import Shows, ViewedCache
from tandem.lengths import ANY_LENGTH
from tandem.speculation.draft import Draft
from tandem.speculation.feedback import FeedbackWanted
from tandem.speculation.tree import DraftSize
from tandem.target.v1 import target_pb2
from tandem.telemetry.stages import StageTimes
from target_svc.round import NOTHING_COMPUTED, Resumable, TargetSequence, verify


@dataclass(frozen=True)
class OwnDrafts:
    """A drafting method over the target's own engine.

    Attributes:
        drafter: the method.
        info: what the handshake says of it, but for what passes take.
        vocab_size: of the target.
        feedback: that the method wants; None for none.
        exit: first layers of the target, which drafted; it verifies by the layers after them. 0
            where it computes all layers of drafted rows.
        on_device: whether chains stay on the device until they are decided: target and drafter
            share one that works by itself, and a round waits for it once. On a CPU nothing is
            copied, and the rules' kernels take drafts of the host.
    """

    drafter: Drafter
    info: target_pb2.TargetDrafts
    vocab_size: int
    on_device: bool = False
    feedback: FeedbackWanted | None = None
    exit: int = 0

    def room_behind(self, length: int) -> int:
        """Tokens that the method can draft after a text of a length; more than any draft where
        nothing bounds it."""
        held = self.info.held_length or ANY_LENGTH
        return max(held - length, 0)

    def round(
        self, scorer: Scorer, sequence: TargetSequence, round_: int, size: DraftSize
    ) -> Steps[tuple[Decision, StageTimes]]:
        """Draft after what was emitted, and verify; the verdict, and where the draft's time went.

        The drafter takes the text in when the first draft is wanted: a text whose drafts come from
        elsewhere costs it no pass.

        Args:
            scorer: the target's model.
            sequence: with at least two tokens.
            round_: keys the numbers.
            size: of the draft, at least 1 deep.

        Raises:
            EngineFailure: a distribution of either model was not finite.
        """
        own, request = sequence.own, sequence.request
        assert own is not None  # it is kept where there is a drafter
        news, feedback = own.take()
        drafting = own.sequence
        if drafting is None:
            text, news = news[:-1], news[-1:]
            drafting = DraftSequence(text, request.sampling, self.vocab_size, request.nodes)
            drafting.caches, drafting.shaped = sequence.caches[1:], sequence.shaped
            for cache in drafting.caches:
                if isinstance(cache, Shows):
                    cache.show(sequence.caches[0])
            drafting.salt = request.salt
            own.sequence = drafting
            yield from self.drafter.open(drafting)
        method = go_on(self.drafter, drafting, round_, news, size, feedback)
        drafted = yield from (_to_chain(method) if self.on_device else method)
        times: StageTimes = yield Lap("draft")
        computed = self._computed(drafting, own.wanted)
        decision = yield from verify(scorer, sequence, round_, drafted, own.wanted, computed)
        if drafted is not decision.draft:
            _end(method, decision.draft)
        if request.rule.needs_every_draft and len(decision.draft) < size.gamma:
            # It ends before a row that was not finite, and the rule is exact at full length alone.
            raise not_finite("drafter")
        return decision, times

    def _computed(self, drafting: DraftSequence, wanted: FeedbackWanted | None) -> Resumable:
        """What the target need not compute of the draft just made."""
        if not self.exit or (wanted is not None and wanted.columns):
            return NOTHING_COMPUTED
        for cache in drafting.caches:
            if isinstance(cache, ViewedCache) and cache.can_be_resumed:
                return Resumable(Resumed(self.exit, cache.exit_states), cache.nodes)
        return NOTHING_COMPUTED


def _to_chain(method: Steps[Draft]) -> Steps[Draft | Sequence[DrawnToken]]:
    """A method's steps up to its draft; or, where that is a chain, up to the ask to bring it to the
    host, for whose answer the method then waits.

    A tree is brought to the host: which nodes it has follows from what was drawn.
    """
    answer: Any = None
    while True:
        try:
            ask = method.send(answer)
        except StopIteration as ended:
            draft: Draft = ended.value
            return draft
        if isinstance(ask, ToHost) and ask.places is None:
            assert not isinstance(ask.answers, DeviceVerdict)  # methods decide nothing
            return ask.answers
        answer = yield ask


def _end(method: Steps[Draft], draft: Draft) -> None:
    """Answer a method's last ask.

    Raises:
        RuntimeError: it goes on, or drafts something else than was decided.
    """
    try:
        method.send(draft)
    except StopIteration as ended:
        if ended.value is draft:
            return
    raise RuntimeError("a drafting method must end with the chain that it brings to the host")
