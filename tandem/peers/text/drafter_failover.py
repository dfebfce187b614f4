"""The drafter of a text, which may be lost on the way: the text goes on without."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import structlog

from tandem.errors import (
    DrafterLost,
    Exhausted,
    OutOfTime,
    SequenceGivenBack,
    SequenceIdled,
    ShortDraft,
    TandemError,
    Unavailable,
)
from tandem.peers.text.contracts import AheadWay, DraftReply, News, Prompt, TextDrafter
from tandem.peers.text.record import TextRecord
from tandem.peers.text.values import Rule
from tandem.rpc.status import notes_of
from tandem.speculation.tree import DraftSize

_log = structlog.get_logger(__name__)


# A text that has lost this number of drafters goes on without: looking for another costs it more.
_MOST_LOSSES = 8
# A drafter that is not asked for this long is let go, so that others get its slot and memory. A
# full drafter takes them back by itself, but later (FULL_IDLE_SECONDS).
REST_SECONDS = 10.0
# How long a text does without the drafter that needed its memory, at first and at most.
_AWAY_SECONDS, _MOST_AWAY_SECONDS = 0.25, 30.0


class DrafterWithFailover:
    """Drafts as long as there is a drafter.

    It is opened beside the target, or later, when the first draft is wanted; it is let go where
    none has been wanted for long. One that fails is left, and another one, or the same when it is
    back, is opened after what was emitted: rounds go on without drafts until then, or wait for it.

    Attributes:
        lost: whether a drafter failed on the way, or was wanted and not there.

    Args:
        make: a fresh sequence, or None where there is no drafter.
        prompt: the text so far.
        record: the text's; books the wait for a late opening, and rounds.
        seconds: how long a round waits for that, by now.
        rule: that decides; one that needs every draft cannot go on without its drafter.
        on_loss: called with the error when the drafter is lost; with None if there is none to open.
        let_go: called when the drafter serves the text no more.
        most_feedback_bytes: of the target's feedback, to keep for the next draft.
        wait_for: a fresh sequence as soon as a drafter has room, for a text that waits for its
            drafter; None where rounds go on without. It may raise TandemError.
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
        wait_for: Callable[[], Awaitable[TextDrafter]] | None = None,
    ) -> None:
        self.lost = False
        self._make = make
        self._prompt = prompt
        self._drafter: TextDrafter | None = None
        self._record = record
        self._seconds = seconds
        self._rule = rule
        self._wait_for = wait_for
        self._on_loss = on_loss
        self._let_go = let_go
        self._opening: asyncio.Task[object] | None = None
        self._late = False
        self._losses = 0
        self._again = False  # whether a round asks a second time
        # It was given back: until when it stays away, by time.monotonic(), and how long next time.
        self._not_before, self._away = 0.0, _AWAY_SECONDS
        self._asked = time.monotonic()
        # Emitted, and not told to the drafter yet.
        self._untold: list[int] = []
        self._feedback: deque[Any] = deque()
        self._feedback_bytes = 0
        self._most_feedback_bytes = most_feedback_bytes

    async def begin(self) -> None:
        """Open it beside the target, in the background; the first round waits until it is open.

        Raises:
            Unavailable: there is none, and the rule cannot go on without.
            TandemError: the text waits for one, and none had room in time.
        """
        self._late = False
        drafter = self._make() if self._wait_for is None else await self._with_room(self._wait_for)
        self._open(drafter)

    async def _with_room(self, wait_for: Callable[[], Awaitable[TextDrafter]]) -> TextDrafter:
        with self._record.stage("open_wait"):
            return await wait_for()

    def begin_late(self) -> None:
        """Open it, in the background; rounds go on without drafts until it is open.

        Raises:
            Unavailable: there is none, and the rule cannot go on without.
        """
        self._late = True
        self._open(self._make())

    def _open(self, drafter: TextDrafter | None, *, drafts_at_once: bool = False) -> None:
        self._untold = []
        self._drafter = drafter
        if self._drafter is not None:
            prompt = self._prompt()
            if drafts_at_once:  # a draft follows a token that is told with it
                prompt, self._untold = split_last(prompt)
            self._opening = asyncio.create_task(self._drafter.open(prompt))
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
    ) -> DraftReply | None:
        """A draft, or None: while there is no drafter that the text waits for, or it is opened
        late, and for a round that loses it.

        Args:
            round_: number of the round.
            length: of the text so far, in tokens.
            size: of the draft.
            ahead: how the next drafts are prepared after this one.

        Raises:
            DrafterLost: the rule cannot go on without.
            TandemError: the text waits for a drafter, and none had room in time, or opened.
            ShortDraft: the rule needs a longer one.
            OutOfTime: the text's deadline came first.
        """
        if not size.gamma or self._losses >= _MOST_LOSSES:
            self._rest()
            return None
        self._asked = time.monotonic()
        if not await self._is_open(round_):
            return None
        assert self._drafter is not None
        try:
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
        except SequenceIdled as error:
            self._lose(error, round_)
            if self._wait_for is None or isinstance(error, SequenceGivenBack) or self._again:
                return None
            # While the target had no room for the text, its drafter heard nothing. Nothing was
            # drawn for the round, and what is drawn now is what would have been.
            self._again = True
            try:
                return await self.draft(round_, length, size, ahead)
            finally:
                self._again = False
        except TandemError as error:
            self._lose(error, round_)
            return None  # whatever was drafted may be why: none is drafted in its place
        self._untold, self._feedback_bytes = [], 0
        self._feedback.clear()
        if self._not_before and time.monotonic() - self._not_before > _MOST_AWAY_SECONDS:
            self._not_before, self._away = 0.0, _AWAY_SECONDS  # it has stayed for long
        return drafted

    async def _is_open(self, round_: int) -> bool:
        """Whether there is a drafter for this round; a text that waits for its drafter waits."""
        while True:
            if self._drafter is None and self._wait_for is not None:
                self._late = False
                drafter = await self._with_room(self._wait_for)
                self._open(drafter, drafts_at_once=True)
            elif self._drafter is None and time.monotonic() >= self._not_before:
                self.begin_late()
            if self._drafter is None or (self._late and self._opening and not self._opening.done()):
                return False
            self._record.times.start_round()
            if self._opening is None:
                return True
            try:
                await self._opened(self._opening)
            except OutOfTime:
                raise
            except TandemError as error:
                self._lose(error, round_)
                if self._wait_for is None:
                    return False
                if self._losses >= _MOST_LOSSES:
                    raise DrafterLost(
                        f"the text waits for its drafter, which failed {self._losses} times; try"
                        " again, or leave out seed or gamma"
                    ) from error
            else:
                return True

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
        # A text that waits for room is refused as often as it takes. One that was given back comes
        # back later each time: its drafter computes all of it again.
        given_back = isinstance(error, SequenceGivenBack)
        if given_back or (isinstance(error, Exhausted) and self._not_before > 0):
            self._not_before = time.monotonic() + self._away
            self._away = min(2 * self._away, _MOST_AWAY_SECONDS)
        waits = self._wait_for is not None or self._not_before > 0
        self._losses += not (given_back or (isinstance(error, Exhausted) and waits))
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


def split_last(prompt: Prompt) -> tuple[Prompt, list[int]]:
    """What opens a sequence one token earlier, and this token."""
    *before, last = prompt.token_ids
    earlier = replace(
        prompt,
        token_ids=before,
        max_new_tokens=prompt.max_new_tokens + 1,
        emitted_tokens=prompt.emitted_tokens - 1,
    )
    return earlier, [last]
