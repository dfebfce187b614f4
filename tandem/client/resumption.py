"""A text that survives the loss of its orchestrator: what to ask next, and when."""

from __future__ import annotations

from collections.abc import Callable

from tandem.client.errors import CallFailed, Lost
from tandem.orchestrator.v1 import orchestrator_pb2 as pb

# Between two attempts: the pause doubles from the first to the last.
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0


class Resumption:
    """The state of one text over several calls.

    Received tokens are never requested again: see `received_token_ids` in orchestrator.proto.

    Attributes:
        asked: the request that goes on after what was received.

    Args:
        generation: what to generate. Without a seed each call has one of its own: to draw one here
            would ask for a text that can be repeated, which waits for its drafter.
        seconds: how long to try again after the text's orchestrator is lost; 0 gives up at once.
        timeout_s: for the whole text; None for none.
        now: seconds of a clock that never goes back.
        note: is called with a sentence about each loss.
    """

    def __init__(
        self,
        generation: pb.Generation,
        seconds: float,
        timeout_s: float | None,
        now: Callable[[], float],
        note: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.asked = pb.Generation()
        self.asked.CopyFrom(generation)
        self._seconds, self._now, self._note = seconds, now, note
        self._until = None if timeout_s is None else now() + timeout_s
        self._rounds = 0
        # The loss since which no message has come, and when it was.
        self._loss: Lost | None = None
        self._lost_at = 0.0
        self._pause = _FIRST_PAUSE

    @property
    def left(self) -> float | None:
        """Seconds until the time-out; None for none."""
        return None if self._until is None else max(self._until - self._now(), 0.0)

    def follow(self, reply: pb.GenerateResponse) -> pb.GenerateResponse:
        """A reply; the summary counts tokens and rounds of all calls."""
        self._loss, self._pause = None, _FIRST_PAUSE
        if reply.WhichOneof("event") == "round":
            self.asked.received_token_ids.extend(token.id for token in reply.round.tokens)
            self.asked.first_round = reply.round.round + 1
            if self.asked.HasField("log_probs"):
                self.asked.log_probs.prompt = False  # they have come
            self._rounds += 1
        else:
            reply.summary.new_tokens = len(self.asked.received_token_ids)
            reply.summary.rounds = self._rounds
        return reply

    def pause(self, failure: CallFailed) -> float:
        """Seconds to wait before the next attempt.

        Args:
            failure: of the last attempt.

        Raises:
            CallFailed: why there is no further attempt.
        """
        now = self._now()
        if self._loss is not None and not isinstance(failure, Lost):
            raise type(failure)(f"{self._loss}; it could not go on: {failure}", failure.status)
        if not isinstance(failure, Lost) or not self._rounds:
            raise failure
        if self._loss is None:
            self._loss, self._lost_at = failure, now
            self._note(f"the text broke off ({failure}); going on")
        late = self._until is not None and now + self._pause > self._until
        if late or now - self._lost_at + self._pause > self._seconds:
            raise self._loss
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return pause
