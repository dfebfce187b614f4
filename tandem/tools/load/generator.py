"""A load generator: requests texts over gRPC, in a closed or an open loop."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from tandem.client.errors import sentence
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.endpoint import Endpoint, endpoint_at
from tandem.tools.load.requests import MAX_IN_FLIGHT
from tandem.tools.load.timeline import Timeline

# A status may carry pages of details, and each text of a load different ones.
_LONGEST_ERROR = 240
# Trailing metadata in which a refusal says when to retry.
_PUSHBACK = "grpc-retry-pushback-ms"


class LoadGenerator:
    """A connection to an orchestrator; use it as an async context manager.

    Args:
        where: the orchestrator's endpoint or address.
        timeout_s: how long a text may take, so that a load ends even if a service hangs.
    """

    def __init__(self, where: Endpoint | str, timeout_s: float = 600.0) -> None:
        self._place = endpoint_at(where)
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        self._channel = self._place.connect()
        self._stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def text(
        self,
        generation: pb.Generation,
        intended_s: float | None = None,
        timeout_s: float | None = None,
        seen: Callable[[pb.GenerateResponse], object] = lambda event: None,
    ) -> Timeline:
        """One text; a call that fails is a timeline with an error.

        Args:
            generation: what to request.
            intended_s: when the text was due, by time.perf_counter(); now by default.
            timeout_s: how long this text may take, if not the generator's `timeout_s`.
            seen: is called with each message; an exception it raises cancels the call and
                propagates.
        """
        arrivals: list[tuple[float, int]] = []
        summary, error, retry = None, "", None
        asked = time.perf_counter()
        call = self._stub.Generate(
            pb.GenerateRequest(generation=generation),
            timeout=self._timeout_s if timeout_s is None else timeout_s,
            metadata=self._place.metadata,
        )
        try:
            async for event in call:
                seen(event)
                if event.HasField("round"):
                    arrivals.append((time.perf_counter(), len(event.round.tokens)))
                else:
                    summary = event.summary
        except grpc.aio.AioRpcError as failed:
            error = cut(sentence(failed.code(), failed.details()))
            told = dict(failed.trailing_metadata() or ()).get(_PUSHBACK)
            retry = None if told is None else float(told) / 1e3
        finally:
            call.cancel()
        due = asked if intended_s is None else intended_s
        return Timeline(
            intended_s=due,
            asked_s=asked,
            arrivals=tuple(arrivals),
            ended_s=time.perf_counter(),
            error=error,
            summary=summary,
            retry_s=retry,
        )

    async def whole(self, generation: pb.Generation) -> pb.CompleteResponse:
        """One text in one answer.

        Raises:
            grpc.aio.AioRpcError: the call failed.
        """
        reply: pb.CompleteResponse = await self._stub.Complete(
            pb.CompleteRequest(generation=generation),
            timeout=self._timeout_s,
            metadata=self._place.metadata,
        )
        return reply

    async def closed_loop(
        self,
        generations: Sequence[pb.Generation],
        concurrency: int,
        ended: Callable[[Timeline], object] = lambda text: None,
    ) -> list[Timeline]:
        """Clients that each request a text as soon as their last one has ended.

        Args:
            generations: taken in order by whichever client is free.
            concurrency: number of clients.
            ended: is called with each text that has ended.
        """
        waiting = iter(generations)
        timelines: list[Timeline] = []

        async def client() -> None:
            for generation in waiting:
                text = await self.text(generation)
                timelines.append(text)
                ended(text)

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return timelines

    async def open_loop(
        self,
        generations: Sequence[pb.Generation],
        rate: float,
        seed: int,
        ended: Callable[[Timeline], object] = lambda text: None,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> list[Timeline]:
        """Texts requested at random moments, however busy the server is.

        Args:
            generations: requests, in order.
            rate: mean texts a second; gaps are exponential (a Poisson process).
            seed: of the gaps.
            ended: is called with each text that has ended.
            max_in_flight: most texts in flight. A further one is requested when there is room,
                but its times still count from when it was due.
        """
        gaps = random.Random(seed)
        due = time.perf_counter()
        places = asyncio.Semaphore(max_in_flight)

        async def one(generation: pb.Generation, intended_s: float) -> Timeline:
            await asyncio.sleep(intended_s - time.perf_counter())
            async with places:
                timeline = await self.text(generation, intended_s)
            ended(timeline)
            return timeline

        texts = []
        for generation in generations:
            due += gaps.expovariate(rate)
            texts.append(one(generation, due))
        return list(await asyncio.gather(*texts))


def cut(error: str) -> str:
    """An error as a timeline keeps it."""
    return error if len(error) <= _LONGEST_ERROR else f"{error[: _LONGEST_ERROR - 1]}…"
