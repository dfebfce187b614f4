"""Drafts that a target makes itself, in the process that verifies them."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.drafting.drafter import Drafter, DraftSequence
from tandem.engine.asks import Lap, Steps
from tandem.speculation.draft import Draft
from tandem.target.v1 import target_pb2
from tandem.telemetry.stages import StageTimes
from target_svc.round import TargetSequence


@dataclass(frozen=True)
class OwnDrafts:
    """A drafting method over the target's own engine.

    Attributes:
        drafter: the method.
        info: what the handshake says of it.
        vocab_size: of the target.
    """

    drafter: Drafter
    info: target_pb2.TargetDrafts
    vocab_size: int

    def draft(
        self, sequence: TargetSequence, round_: int, gamma: int, nodes: int
    ) -> Steps[tuple[Draft, StageTimes]]:
        """Draft behind what was emitted; the draft, and where its time went.

        The drafter takes the text in when the first draft is wanted: a text whose drafts come from
        elsewhere costs it no pass.

        Args:
            sequence: with at least two tokens.
            round_: keys the numbers of the draws.
            gamma: most tokens of the longest path, at least 1.
            nodes: most tokens of a tree; 0 for none beside gamma.
        """
        news = sequence.untold
        assert news is not None  # it is kept where there is a drafter
        sequence.untold = []
        own = sequence.drafting
        if own is None:
            text, news = news[:-1], news[-1:]
            own = DraftSequence(text, sequence.sampling, self.vocab_size, sequence.nodes)
            own.caches = sequence.caches[1:]
            sequence.drafting = own
            yield from self.drafter.open(own)
        draft = yield from self.drafter.go_on(own, round_, news, gamma, nodes)
        times: StageTimes = yield Lap("draft")
        return draft, times
