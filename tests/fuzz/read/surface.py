"""A surface: code that mutated bytes are given to, and the outcomes that are allowed."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from google.protobuf.message import DecodeError, Message

from tandem.errors import TandemError
from tandem.rpc.status import code_of
from tests.fuzz.mutation import mutant

NO_MESSAGE = "no message"
# A service's INTERNAL is a bug of its own, whatever it was sent.
REFUSALS = ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "UNAVAILABLE")


class Violation(Exception):
    """Something came of bytes that the contract does not allow.

    Attributes:
        data: the bytes.
    """

    def __init__(self, data: bytes, sentence: str) -> None:
        super().__init__(sentence)
        self.data = data


class Surface(ABC):
    """Takes bytes, and says what came of them.

    Attributes:
        name: of the surface, which names of its files in the corpus begin with.
        share: of the messages of a run.
        seeds: valid messages, of one kind.
        sentence: of the last refusal.
    """

    name: ClassVar[str]
    share: ClassVar[float]
    seeds: Sequence[Message]
    sentence = ""

    async def start(self) -> None:
        """Whatever takes long."""
        return

    async def stop(self) -> None:
        """Give it back.

        Raises:
            Violation: something is left of what was sent.
        """
        return

    def draw(self, source: random.Random) -> bytes:
        """Mutated bytes."""
        return mutant(source, self.seeds)

    @abstractmethod
    async def check(self, data: bytes) -> str:
        """What came of bytes, in a word.

        Raises:
            Violation: it may not.
        """


class MessageSurface(Surface):
    """Takes bytes that are read as a message of the seeds' kind before."""

    async def check(self, data: bytes) -> str:
        """See `Surface`."""
        self.sentence = ""
        try:
            message = type(self.seeds[0]).FromString(data)
        except DecodeError:
            return NO_MESSAGE
        try:
            return await self.judge(message)
        except TandemError as error:
            self.sentence = str(error)
            if (name := code_of(error).name) not in self.refusals():
                raise Violation(data, f"{name}: {error}") from error
            return name
        except Violation:
            raise
        except Exception as error:
            raise Violation(data, f"{type(error).__name__}: {error}") from error

    def refusals(self) -> Sequence[str]:
        """Statuses that a message may be refused with."""
        return REFUSALS

    @abstractmethod
    async def judge(self, message: Message) -> str:
        """What comes of a message; may raise anything."""
