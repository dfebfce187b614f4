"""A sequence's drafts ahead: begun when a draft is sent, stopped when the next step comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from drafter_svc.messages import drafts_to
from tandem.drafter.v1 import drafter_pb2
from tandem.drafting.ahead.prepare import Ahead
from tandem.drafting.drafter import DraftSequence
from tandem.engine.engine import Engine
from tandem.speculation.draft import Draft
from tandem.speculation.tree import DraftSize


class AheadLimits(NamedTuple):
    """What may be prepared ahead.

    Attributes:
        nodes: drafted tokens at a time, for all sequences together; 0 prepares nothing.
        bytes: of drafts that are sent.
    """

    nodes: int = 0
    bytes: int = 0


NOTHING_AHEAD = AheadLimits()


class Preparing:
    """Prepares drafts of one sequence, and tells of them where that is wanted. Event loop.

    Args:
        engine: prepares while it is idle.
        sequence: for which drafts are prepared.
        ahead: what is prepared; None where nothing is.
        limits: of what is prepared and sent.
        say: takes an answer.
        request_id: for the log.
    """

    def __init__(
        self,
        engine: Engine,
        sequence: DraftSequence,
        ahead: Ahead | None,
        limits: AheadLimits,
        say: Callable[[drafter_pb2.SequenceResponse], None],
        request_id: str,
    ) -> None:
        self._engine, self._sequence = engine, sequence
        self._ahead, self._limits = ahead, limits
        self._say = say
        self._request_id = request_id
        self._job: asyncio.Future[None] | None = None
        self._asked: drafter_pb2.DraftStep | None = None  # whose drafts are still to be sent
        self._ended = False

    def expect(self, request: drafter_pb2.DraftStep) -> None:
        """A step is about to be answered."""
        self._asked = request if request.send_ahead else None

    def begin(self, request: drafter_pb2.DraftStep, draft: Draft) -> None:
        """Draft on after a draft that was sent, unless the next step is there already."""
        if self._ended or not request.ahead:
            return
        if self._ahead is None:
            self._send()
            return
        share = self._limits.nodes // max(self._engine.admission.open_sequences, 1)
        size = DraftSize(request.gamma, request.max_nodes)
        steps = self._ahead.prepare(request.round, draft, size, share)
        self._job = self._engine.run_idle(self._sequence, steps, self._request_id)
        self._job.add_done_callback(self._over)

    def stop(self) -> None:
        """The next step comes, or the end: what is being prepared is dropped. A caller that waits
        for drafts is told of none."""
        if self._job is not None:
            self._job.remove_done_callback(self._over)
            self._job.cancel()
            self._job = None
        self._send()

    def end(self) -> None:
        """The sequence is over."""
        self._ended, self._asked = True, None
        self.stop()

    def _over(self, job: asyncio.Future[None]) -> None:
        self._send(job)

    def _send(self, job: asyncio.Future[None] | None = None) -> None:
        """Send the drafts of a job that has ended, if they were asked for; without a job, a message
        with none."""
        request, self._asked = self._asked, None
        if request is None:
            return
        ready = self._ahead.ready if self._ahead is not None and job is not None else []
        opened = self._engine.admission.open_sequences
        prepared = drafts_to(request.round, ready, self._limits.bytes, opened)
        self._say(drafter_pb2.SequenceResponse(prepared=prepared))
