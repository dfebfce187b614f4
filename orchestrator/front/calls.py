"""The calls that are here, whatever front end they came to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from orchestrator.front.client import ReadingClient
from orchestrator.front.serving import Serving
from orchestrator.settings import OrchestratorSettings
from tandem.errors import Exhausted, TandemError
from tandem.peers.text.record import GRPC, TextRecord


class OpenCalls:
    """Counts calls, and knows those whose texts are made.

    Args:
        settings: bounds and waits.
        serving: what is served.
    """

    def __init__(self, settings: OrchestratorSettings, serving: Serving) -> None:
        self._settings = settings
        self._serving = serving
        self._here = 0
        self._clients: set[ReadingClient] = set()  # of texts that are made, or waited for
        self._changed = asyncio.Event()

    def enter(self) -> None:
        """Count a call, until it leaves.

        Raises:
            Exhausted: there are too many.
        """
        limit = self._settings.max_requests
        if self._here >= limit:
            raise Exhausted(
                f"all {limit} places are taken; try again later, with backoff", retry_seconds=1.0
            )
        self._here += 1

    def leave(self) -> None:
        """A call that was counted is over."""
        self._here -= 1

    @contextmanager
    def refusals(self, front: str = GRPC) -> Iterator[None]:
        """Count and log a call of a front that is refused before its text is begun."""
        try:
            yield
        except TandemError as error:
            serving = self._serving
            refused = TextRecord(metrics=serving.metrics, model=serving.model, front=front)
            refused.fail(error)
            refused.end()
            raise

    @asynccontextmanager
    async def serving(self, client: ReadingClient) -> AsyncIterator[None]:
        """Know of a client while its text is made."""
        self._clients.add(client)
        try:
            yield
        finally:
            self._clients.discard(client)
            self._changed.set()

    async def drained(self) -> None:
        """Wait for the last text that moves, and then no longer for clients that do not read."""
        seconds = self._settings.full_idle_seconds
        for client in self._clients:
            client.hurry(seconds, "the orchestrator is stopping")
        while True:
            while self._clients:
                self._changed.clear()
                await self._changed.wait()
            await asyncio.sleep(seconds)  # for the end of a text to reach its client
            if not self._clients:  # nor did a call begin whose body was on its way
                return
