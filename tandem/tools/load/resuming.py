"""A text that survives the loss of its orchestrator: it goes on there later, or at another one."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tandem.failure import Failure
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.rpc.endpoint import Endpoint
from tandem.tools.load.client import Client, Lost

# Between two attempts: the pause doubles from the first to the last.
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0


class Resuming:
    """One text, from the first of several orchestrators that answers.

    All must serve the same target. Received tokens are never requested again: see
    `received_token_ids` in orchestrator.proto.

    Args:
        places: of orchestrators, tried in turn.
        seconds: how long to try again after a text's orchestrator is lost; 0 gives up at once.
        note: is called with a sentence about each loss.
    """

    def __init__(
        self,
        places: Sequence[Endpoint | str],
        seconds: float,
        note: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._places = deque(places)
        self._seconds = seconds
        self._note = note
        self._rounds = 0
        # The loss since which no message has come, and when it was.
        self._loss: Lost | None = None
        self._lost_at = 0.0
        self._pause = _FIRST_PAUSE

    @contextmanager
    def connected(self) -> Iterator[Client]:
        """A client of the first orchestrator that answers, starting with the last that did.

        Raises:
            Lost: no orchestrator answers.
        """
        with ExitStack() as stack:
            yield self._connect(stack)

    def _connect(self, stack: ExitStack) -> Client:
        for tried in range(1, len(self._places) + 1):
            try:
                return stack.enter_context(Client(self._places[0]))
            except Lost:
                self._places.rotate(-1)
                if tried == len(self._places):
                    raise
        raise AssertionError("there is at least one address")

    def generate(
        self, generation: pb.Generation, timeout_s: float | None = None
    ) -> Iterator[pb.GenerateResponse]:
        """A text, round by round, then its summary, which counts tokens and rounds of all calls.

        Args:
            generation: what to generate; without a seed, one is drawn for all calls.
            timeout_s: for the whole text.

        Raises:
            Failure: the call's status, in one sentence; the loss's, if the text could not go on.
        """
        asked = pb.Generation()
        asked.CopyFrom(generation)
        if not asked.sampling.HasField("seed"):
            asked.sampling.seed = secrets.randbits(64)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                with self.connected() as client:
                    left = None if until is None else max(until - time.monotonic(), 0.0)
                    yield from self._followed(client.generate(asked, left), asked)
                return
            except Failure as failure:
                self._wait(failure, until)

    def complete(
        self, generation: pb.Generation, timeout_s: float | None = None
    ) -> pb.CompleteResponse:
        """The same as `generate`, as one answer.

        Raises:
            Failure: see `generate`.
        """
        reply = pb.CompleteResponse()
        texts: list[str] = []
        for event in self.generate(generation, timeout_s):
            if event.HasField("summary"):
                reply.summary.CopyFrom(event.summary)
                continue
            tokens = event.round.tokens
            texts.extend(token.text for token in tokens)
            reply.token_ids.extend(token.id for token in tokens)
            reply.origins.extend(token.origin for token in tokens)
        reply.text = "".join(texts)
        return reply

    def _followed(
        self, replies: Iterator[pb.GenerateResponse], asked: pb.Generation
    ) -> Iterator[pb.GenerateResponse]:
        """Replies as they come; each is added to the request that would resume the text."""
        for reply in replies:
            self._loss, self._pause = None, _FIRST_PAUSE
            if reply.WhichOneof("event") == "round":
                asked.received_token_ids.extend(token.id for token in reply.round.tokens)
                asked.first_round = reply.round.round + 1
                self._rounds += 1
            else:
                reply.summary.new_tokens = len(asked.received_token_ids)
                reply.summary.rounds = self._rounds
            yield reply

    def _wait(self, failure: Failure, until: float | None) -> None:
        """Pause before the next attempt.

        Args:
            failure: of the last attempt.
            until: deadline of the whole text, by time.monotonic(); None for none.

        Raises:
            Failure: why there is no further attempt.
        """
        now = time.monotonic()
        if self._loss is not None and not isinstance(failure, Lost):
            raise Failure(f"{self._loss}; it could not go on: {failure}")
        if not isinstance(failure, Lost) or not self._rounds:
            raise failure
        if self._loss is None:
            self._loss, self._lost_at = failure, now
            self._note(f"the text broke off ({failure}); going on")
        self._places.rotate(-1)
        late = until is not None and now + self._pause > until
        if late or now - self._lost_at + self._pause > self._seconds:
            raise self._loss
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
