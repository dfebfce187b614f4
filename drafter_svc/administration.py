"""LearningService: what an administrator sees and does of a drafter that learns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tandem.drafter.v1 import learning_pb2, learning_pb2_grpc
from tandem.errors import Exhausted, StartupError, Unsupported
from tandem.online.learning import Learning
from tandem.rpc.server import GrpcService
from tandem.rpc.status import status_boundary


class LearningServicer(learning_pb2_grpc.LearningServiceServicer):
    """See learning.proto.

    Args:
        learning: of the drafter; None where it does not learn.
    """

    def __init__(self, learning: Callable[[], Learning | None]) -> None:
        self._learning = learning

    def _own(self) -> Learning:
        own = self._learning()
        if own is None:
            raise Unsupported("this drafter does not learn: its ONLINE is 0")
        return own

    async def GetLearning(
        self, request: learning_pb2.GetLearningRequest, context: Any
    ) -> learning_pb2.GetLearningResponse:
        """See learning.proto."""
        async with status_boundary(context):
            own = self._own()
            status = own.status
            reply = learning_pb2.GetLearningResponse(
                weights_version=status.version,
                frozen=status.frozen,
                training=status.training,
                problem=status.problem,
                kept_texts=status.kept_texts,
                held_texts=status.held_texts,
                held_bytes=await asyncio.to_thread(lambda: own.replay.bytes),
                steps=status.steps,
                updates=status.updates,
                turned_down=status.turned_down,
            )
            if status.overlap:
                reply.overlap.served = status.overlap["served"]
                reply.overlap.trained = status.overlap["trained"]
                reply.overlap.forgotten = status.forgotten
            return reply

    async def ResetLearning(
        self, request: learning_pb2.ResetLearningRequest, context: Any
    ) -> learning_pb2.ResetLearningResponse:
        """See learning.proto."""
        async with status_boundary(context):
            own = self._own()
            with _said():
                version = await asyncio.to_thread(own.reset)
            return learning_pb2.ResetLearningResponse(weights_version=version)

    async def FreezeLearning(
        self, request: learning_pb2.FreezeLearningRequest, context: Any
    ) -> learning_pb2.FreezeLearningResponse:
        """See learning.proto."""
        async with status_boundary(context):
            own = self._own()
            with _said():
                await asyncio.to_thread(lambda: own.freeze(frozen=request.frozen))
            return learning_pb2.FreezeLearningResponse()


@contextmanager
def _said() -> Iterator[None]:
    """Tell an administrator the errors of a call in their own words.

    Raises:
        Exhausted: in place of errors of the disk and of memory.
    """
    try:
        yield
    except (OSError, MemoryError, StartupError) as error:
        raise Exhausted(str(error)) from error


def learning_service(learning: Callable[[], Learning | None]) -> GrpcService:
    """The service as the admin port answers it."""
    servicer = LearningServicer(learning)
    return GrpcService(
        "tandem.drafter.v1.LearningService",
        lambda server: learning_pb2_grpc.add_LearningServiceServicer_to_server(servicer, server),
        (),
    )
