"""A test's side of a stream with a single sequence."""

from __future__ import annotations

from collections import deque
from typing import Any

import grpc

from tandem.drafter.v1 import drafter_pb2
from tandem.target.v1 import target_pb2

_MESSAGES = {
    drafter_pb2.SequenceRequest: drafter_pb2.DraftRequest,
    target_pb2.SequenceRequest: target_pb2.VerifyRequest,
}
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def code_named(number: int) -> str:
    """The name of a status code on the wire; the number itself if it is unknown."""
    code = _CODES.get(number)
    return str(number) if code is None else code.name


class Talk:
    """One sequence, alone on a stream.

    Args:
        call: the stream.
    """

    def __init__(self, call: Any) -> None:
        self.call = call
        self._ended: tuple[grpc.StatusCode, str] | None = None
        # Of a message that brought several: of a run's rounds, whichever are ready.
        self._answers: deque[Any] = deque()

    async def write(self, *requests: Any) -> None:
        """Send requests as one message; those without a number belong to sequence 1."""
        for request in requests:
            request.sequence = request.sequence or 1
        await self.call.write(_MESSAGES[type(requests[0])](requests=requests))

    async def read(self) -> Any:
        """The next answer; EOF if the sequence has ended, alone or with the stream."""
        if not self._answers:
            message = await self.call.read()
            if message is grpc.aio.EOF:
                return message
            self._answers.extend(message.responses)
        answer = self._answers.popleft()
        if answer.WhichOneof("result") != "ended":
            return answer
        assert answer.sequence == 1
        self._ended = (_CODES[answer.ended.code], answer.ended.sentence)
        return grpc.aio.EOF

    async def ask(self, request: Any) -> Any:
        """Send a request and read its answer."""
        await self.write(request)
        return await self.read()

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """The status that the sequence ended with, or else the stream's."""
        while self._ended is None:
            try:
                if await self.read() is grpc.aio.EOF:
                    break
            except grpc.aio.AioRpcError:
                break
        return self._ended or (await self.call.code(), await self.call.details())

    def cancel(self) -> None:
        """End the stream."""
        self.call.cancel()
