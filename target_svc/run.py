"""Several rounds that a target computes by itself, with drafts of its own or none."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tandem.engine.answers import Decision
from tandem.engine.asks import Report, Steps
from tandem.engine.scorer import Scorer
from tandem.speculation.tree import DraftSize
from tandem.telemetry.stages import StageTimes
from target_svc.drafts import OwnDrafts
from target_svc.overlap import Overlap, plain_round
from target_svc.round import TargetSequence


@dataclass
class Credit:
    """Rounds that a run may have. The event loop grants them, the engine's thread takes them.

    Attributes:
        round: number of the last one that was begun.
    """

    round: int
    _granted: deque[DraftSize] = field(default_factory=deque)

    @property
    def left(self) -> int:
        """Rounds that may still begin."""
        return len(self._granted)

    def grant(self, count: int, size: DraftSize) -> None:
        """Allow a number of further rounds, with drafts of a size."""
        self._granted.extend([size] * count)

    def take(self) -> tuple[int, DraftSize]:
        """Begin the next one: its number, and the size of its draft."""
        self.round += 1
        return self.round, self._granted.popleft()


class RunRound(NamedTuple):
    """A round of a run.

    Attributes:
        round: its number.
        draft_times: where the time of its draft went; None where there was none.
        decision: its verdict, with the draft.
        length: tokens that the sequence holds after it.
        last: the run ends with it, unless more rounds are granted; where it has `ended`, in any
            case.
        ended: whether the text has: it is as long as it may be, a token of `end_token_ids` was
            emitted, or none may come.
    """

    round: int
    draft_times: StageTimes | None
    decision: Decision
    length: int
    last: bool
    ended: bool


def run(
    scorer: Scorer,
    sequence: TargetSequence,
    credit: Credit,
    drafts: OwnDrafts | None = None,
    overlap: Overlap | None = None,
) -> Steps[None]:
    """Rounds, each reported, as long as there is credit and the text goes on.

    Args:
        scorer: the target's model.
        sequence: that they continue.
        credit: for them.
        drafts: makes the drafts of rounds that are granted any.
        overlap: of the layers in rounds that are granted none; None for whole passes.
    """
    request, ended = sequence.request, False
    while credit.left and not ended:
        round_, granted = credit.take()
        gamma = _fitting(sequence, granted.gamma)
        if drafts is not None:
            gamma = min(gamma, drafts.room_behind(sequence.length))
        size = granted if gamma == granted.gamma else replace(granted, gamma=gamma)
        draft_times = None
        if size.gamma:
            assert drafts is not None  # or no such round is granted
            decision, draft_times = yield from drafts.round(scorer, sequence, round_, size)
        else:
            wanted = None if sequence.own is None else sequence.own.wanted_now
            decision = yield from plain_round(scorer, sequence, round_, wanted, overlap)
        ended = sequence.length >= request.end or decision.dead_end
        ended = ended or not request.end_token_ids.isdisjoint(decision.emitted)
        last = ended or not credit.left
        yield Report(RunRound(round_, draft_times, decision, sequence.length, last, ended))
        if overlap is not None and not size.gamma and not ended:
            yield from overlap.look_ahead(sequence, round_ + 1)


def _fitting(sequence: TargetSequence, gamma: int) -> int:
    """Tokens of the longest path that are of use before the text's end.

    A rule with a fixed gamma needs all that is left; for others the last token is the target's.
    """
    left = sequence.request.end - sequence.length
    return min(gamma, left if sequence.request.rule.needs_every_draft else left - 1)
