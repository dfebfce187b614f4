"""A sequence as a service sees it: a state machine, whatever carries its messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Generic, TypeVar

from opentelemetry.util.types import AttributeValue

from tandem.errors import InvalidRequest, WrongState
from tandem.rpc.streams.entries import StepRequest, StepResponse
from tandem.telemetry.stages import StageTimes
from tandem.telemetry.tracing.ids import SpanIds

Q = TypeVar("Q", bound=StepRequest)
R = TypeVar("R", bound=StepResponse)


@dataclass(slots=True)
class Progress:
    """How far a sequence is, and what may come next.

    Attributes:
        length: tokens held, prompt and emitted.
        last_round: the last round's number.
    """

    length: int
    last_round: int

    def check(self, round_: int, position: int) -> None:
        """Refuse a step that does not follow from the last.

        Raises:
            WrongState: the round is not new, or the position is not ours.
        """
        if round_ <= self.last_round:
            raise WrongState(f"round {round_} is not after round {self.last_round}")
        if position != self.length:
            raise WrongState(f"position {position} does not match the {self.length} tokens held")


@dataclass(slots=True)
class StepReply(Generic[R]):
    """What a step answers, and what its span says.

    Attributes:
        message: the answer; None where nothing is answered.
        step: the span's name.
        times: of its stages.
        attributes: of the span.
        behind: called when the answer is on the wire.
    """

    message: R | None
    step: str
    times: StageTimes
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    behind: Callable[[], None] | None = None


class State(Enum):
    """Where a sequence is in its life; only `open` has a way out of the first state."""

    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


class ServedSequence(ABC, Generic[Q, R]):
    """One sequence of a service.

    Attributes:
        request_id: of the text, once it is open.
        state: where it is in its life.
        many_answers: the step that has several, which `say` takes; it has no span here, since its
            caller makes one of each answer.
        say: sends an answer of the step in `many_answers`.
    """

    many_answers: ClassVar[str] = ""

    def __init__(self) -> None:
        self.request_id = ""
        self.state = State.NEW
        self.say: Callable[[R], None] = lambda answer: None

    async def handle(self, message: Q, traced: SpanIds | None = None) -> StepReply[R] | None:
        """Answer a message; None to `close`, which has no answer, and where all were said.

        Args:
            message: the next one.
            traced: the span of its step, or of its caller's where it has many answers.

        Raises:
            TandemError: the message is refused, or its step failed; the sequence is over.
        """
        kind = message.WhichOneof("step")
        if kind is None:
            raise InvalidRequest("step must be set, to open, a step, or close")
        if kind == "close":
            self.state = State.CLOSED
            return None
        if kind != "open":
            if self.state is not State.OPEN:
                raise WrongState("the first message must be open")
            return await self._step(message, traced)
        if self.state is not State.NEW:
            raise WrongState("the sequence is already open")
        self.state = State.OPEN
        return await self._open(message, traced)

    @abstractmethod
    async def _open(self, message: Q, traced: SpanIds | None) -> StepReply[R]:
        """Open the sequence."""

    @abstractmethod
    async def _step(self, message: Q, traced: SpanIds | None) -> StepReply[R] | None:
        """Do one step of an open sequence."""

    def unanswered(self, message: Q) -> bool:
        """Whether a message has no answer that its caller would wait for: the next one may come
        while it is dealt with."""
        return False

    def more(self, message: Q, amid: Q) -> None:
        """Take a message, not `close`, that comes before the answer to another one.

        Args:
            message: that came.
            amid: that is being answered, or about to be.

        Raises:
            TandemError: it has to wait for that answer; the sequence is over.
        """
        raise WrongState("a request came before the answer to the one before it")

    @abstractmethod
    def release(self) -> None:
        """Give back what the sequence holds. Never waits: a cancelled task may not come back."""
