"""The drafter of a text, which may be lost on the way: the text goes on without."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from tandem.errors import (
    DrafterLost,
    OutOfTime,
    SequenceIdled,
    ShortDraft,
    TandemError,
    Unavailable,
)
from tandem.peers.text.contracts import AheadWay, Drafted, News, Prompt, TextDrafter
from tandem.peers.text.record import TextRecord
from tandem.peers.text.values import Rule
from tandem.rpc.status import notes_of
from tandem.speculation.tree import DraftSize

_log = structlog.get_logger(__name__)


# A text that has lost so many drafters goes on without: looking for another costs it more.
_MOST_LOSSES = 8
# A drafter that was not asked for so long is let go, since its slot and memory are others'; before
# a full one takes them back (FULL_IDLE_SECONDS).
REST_SECONDS = 10.0


class DrafterWithFailover:
    """Drafts as long as there is a drafter.

    It is opened beside the target, or later, when the first draft is wanted; it is let go where
    none has been wanted for long. One that fails is left, and another one, or the same when it is
    back, is opened behind what was emitted: rounds go on without drafts until then.

    Attributes:
        lost: whether a drafter failed on the way, or was wanted and not there.

    Args:
        make: a fresh sequence, or None where there is no drafter.
        prompt: the text so far.
        record: the text's; books the wait for a late opening, and rounds.
        seconds: how long a round waits for that, by now.
        rule: that decides; one that needs every draft cannot go on without its drafter.
        on_loss: called when the drafter is lost, with why; without, where there is none.
        let_go: called when the drafter serves the text no more.
        most_feedback_bytes: of the target's feedback, to keep for the next draft.
    """

    def __init__(
        self,
        make: Callable[[], TextDrafter | None],
        prompt: Callable[[], Prompt],
        record: TextRecord,
        seconds: Callable[[], float],
        rule: Rule,
        on_loss: Callable[[TandemError | None], None],
        let_go: Callable[[], None],
        most_feedback_bytes: int = 0,
    ) -> None:
        self.lost = False
        self._make = make
        self._prompt = prompt
        self._drafter: TextDrafter | None = None
        self._record = record
        self._seconds = seconds
        self._rule = rule
        self._on_loss = on_loss
        self._let_go = let_go
        self._opening: asyncio.Task[object] | None = None
        self._late = False
        self._losses = 0
        self._asked = time.monotonic()
        # Emitted, and not told to the drafter yet.
        self._untold: list[int] = []
        self._feedback: deque[Any] = deque()
        self._feedback_bytes = 0
        self._most_feedback_bytes = most_feedback_bytes

    def begin(self, *, late: bool = False) -> None:
        """Open it, in the background.

        Args:
            late: rounds go on without drafts until it is open; else the first one waits.

        Raises:
            Unavailable: there is none, and the rule cannot go on without.
        """
        self._late, self._untold = late, []
        self._drafter = self._make()
        if self._drafter is not None:
            self._opening = asyncio.create_task(self._drafter.open(self._prompt()))
            # A text may end before anyone asks how the opening went.
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
            return
        if self._rule.needs_every_draft:
            raise Unavailable(
                f"{self._rule.name} needs a drafter, and none is available; try again"
            )
        if not self.lost:  # else it is asked for in each round
            self._on_loss(None)
        self.lost = True

    def tell(self, emitted: list[int], feedback: Any = None) -> None:
        """Have the next draft follow tokens that were emitted, with the target's feedback on them.

        Of more feedback than a message to a drafter holds, the newest is kept: a drafter needs an
        unbroken run of positions, up to the last one.
        """
        self._untold += emitted
        if feedback is None:
            return
        self._feedback.append(feedback)
        self._feedback_bytes += feedback.ByteSize()
        while self._feedback_bytes > self._most_feedback_bytes:
            self._feedback_bytes -= self._feedback.popleft().ByteSize()

    async def draft(
        self, round_: int, length: int, size: DraftSize, ahead: AheadWay = AheadWay.NOTHING
    ) -> Drafted | None:
        """A draft, or None: while there is no drafter, or it is opened late.

        Args:
            round_: number of the round.
            length: of the text so far, in tokens.
            size: of the draft.
            ahead: how the next drafts are prepared behind this one.

        Raises:
            DrafterLost: the rule cannot go on without.
            ShortDraft: the rule needs a longer one.
            OutOfTime: the text's deadline came first.
        """
        if not size.gamma or self._losses >= _MOST_LOSSES:
            self._rest()
            return None
        self._asked = time.monotonic()
        if self._drafter is None:
            self.begin(late=True)
        if self._drafter is None or (self._late and self._opening and not self._opening.done()):
            return None
        self._record.times.start_round()
        try:
            if self._opening is not None:
                await self._opened(self._opening)
            drafted = await self._drafter.draft(
                round_,
                length - len(self._untold),
                News(self._untold, self._feedback),
                size,
                self._rule.needs_every_draft,
                ahead,
            )
        except (OutOfTime, ShortDraft):  # neither says that the drafter is lost
            raise
        except TandemError as error:
            self._lose(error, round_)
            return None
        self._untold, self._feedback_bytes = [], 0
        self._feedback.clear()
        return drafted

    def _rest(self) -> None:
        """Let a drafter go that has not been asked for long."""
        if self._drafter is not None and time.monotonic() - self._asked > REST_SECONDS:
            self._leave()

    def _leave(self) -> None:
        self.cancel()
        self._drafter = self._opening = None
        self._let_go()

    async def _opened(self, opening: asyncio.Task[object]) -> None:
        # Meanwhile the target's stream is silent: wait no longer than for a draft.
        with self._record.stage("open_wait"):
            seconds = self._seconds()
            done, _ = await asyncio.wait((opening,), timeout=seconds)
        if not done:
            raise Unavailable(f"the drafter did not open within {seconds:g} s")
        opening.result()
        self._opening = None

    def _lose(self, error: TandemError, round_: int) -> None:
        _log.warning("drafter lost", error=str(error), notes=notes_of(error), round=round_)
        self._losses += 1
        self.lost = True
        if not isinstance(error, SequenceIdled):  # else it has not failed, and is opened again
            self._on_loss(error)
        self._leave()
        if self._rule.needs_every_draft:
            raise DrafterLost(
                f"{self._rule.name} cannot go on without its drafter; start anew"
            ) from error

    async def close(self) -> None:
        """End it in order, if it is open."""
        if self._drafter is not None and self._opening is None:
            await self._drafter.close()

    def cancel(self) -> None:
        """Abort it. Never waits; harmless after the end."""
        if self._opening is not None:
            self._opening.cancel()
        if self._drafter is not None:
            self._drafter.cancel()
