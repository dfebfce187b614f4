"""The drafter of a text, which may be lost on the way: the text goes on without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from orchestrator.ledger import Ledger
from orchestrator.peers import Drafted, Drafter, DraftSize, Prompt
from tandem.errors import DrafterLost, TandemError, Unavailable
from tandem.rpc.status import notes_of

_log = structlog.get_logger(__name__)


class Drafting:
    """Drafts as long as there is a drafter.

    Attributes:
        lost: whether a drafter failed on the way, or was wanted and not there.

    Args:
        drafter: a fresh sequence; None decodes plainly.
        ledger: books the wait for a late opening, and rounds.
        seconds: how long a round waits for that.
        needed_by: name of the rule that cannot go on without its drafter, at full length;
            empty where the text can.
        on_loss: called when the drafter is lost.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        ledger: Ledger,
        seconds: float,
        needed_by: str,
        on_loss: Callable[[], None],
    ) -> None:
        self.lost = False
        self._drafter = drafter
        self._ledger = ledger
        self._seconds = seconds
        self._needed_by = needed_by
        self._on_loss = on_loss
        self._opening: asyncio.Task[object] | None = None
        # Emitted, and not told to the drafter yet.
        self._news: list[int] = []

    def note_absence(self) -> None:
        """A drafter was wanted, and there is none."""
        self.lost = True
        self._on_loss()

    def begin(self, prompt: Prompt) -> None:
        """Open it, beside the target."""
        if self._drafter is not None:
            self._opening = asyncio.create_task(self._drafter.open(prompt))
            # A text may end before anyone asks how the opening went.
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())

    def tell(self, emitted: list[int]) -> None:
        """Have the next draft follow tokens that were emitted."""
        self._news += emitted

    async def draft(self, round_: int, length: int, size: DraftSize) -> Drafted | None:
        """A draft behind `length` tokens, or None from the moment the drafter fails.

        Raises:
            DrafterLost: the rule cannot go on without.
        """
        if self._drafter is None or not size.gamma:
            return None
        self._ledger.start_round()
        try:
            if self._opening is not None:
                await self._opened(self._opening)
            drafted = await self._drafter.draft(
                round_, length - len(self._news), self._news, size, bool(self._needed_by)
            )
        except TandemError as error:
            self._lose(error, round_)
            return None
        self._news = []
        return drafted

    async def _opened(self, opening: asyncio.Task[object]) -> None:
        # Meanwhile the target's stream is silent: wait no longer than for a draft.
        with self._ledger.stage("open_wait"):
            done, _ = await asyncio.wait((opening,), timeout=self._seconds)
        if not done:
            raise Unavailable(f"the drafter did not open within {self._seconds:g} s")
        opening.result()
        self._opening = None

    def _lose(self, error: TandemError, round_: int) -> None:
        _log.warning("drafter lost", error=str(error), notes=notes_of(error), round=round_)
        self.cancel()
        self._drafter = self._opening = None
        self.lost = True
        self._on_loss()
        if self._needed_by:
            raise DrafterLost(
                f"{self._needed_by} cannot go on without its drafter; start anew"
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
