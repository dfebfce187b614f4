"""Clients that request text after text and compare each with the text of a fault-free run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tests.support.processes.services import generation

_PROMPTS = [[1 + number % 29, 2, 3 + number % 7] for number in range(24)]
_TOKENS = 48
_TEXT_SECONDS = 120.0


@dataclass
class Outcome:
    """What came of the texts so far.

    Attributes:
        texts: that ended OK and equal the fault-free ones.
        failed: statuses and sentences of those that did not end OK.
        wrong: prompts of texts that differ.
        undrafted: texts that lost their drafter.
        given_back: how often a target needed a text's memory.
        reset: calls that met an orchestrator as it stopped, and were made again.
    """

    texts: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    undrafted: int = 0
    given_back: int = 0
    reset: int = 0


class Load:
    """A number of clients at once, at temperature 0.

    Attributes:
        outcome: of all texts so far.
        clients: how many there are.

    Args:
        stub: of an orchestrator.
        clients: see there.
        tokens: of a text.
    """

    def __init__(self, stub: Any, clients: int = 8, tokens: int = _TOKENS) -> None:
        self.outcome = Outcome()
        self._stub = stub
        self._tokens = tokens
        self.clients = clients
        self._expected: list[list[int]] = []
        self._going = asyncio.Event()
        # Of each client: when its text got its last round; None between two texts.
        self._last_round: list[float | None] = [None] * clients
        self._waits: list[float] = []
        self._since: float | None = None

    async def learn(self) -> None:
        """Have the fault-free texts made."""
        self._expected = [await self._text(prompt) for prompt in _PROMPTS]

    async def _text(self, prompt: Sequence[int]) -> list[int]:
        asked = generation(list(prompt), max_new_tokens=self._tokens, temperature=0.0, gamma=4)
        reply = await self._stub.Complete(pb.CompleteRequest(generation=asked), timeout=60)
        return list(reply.token_ids)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask, for as long as the block."""
        self._going.set()
        tasks = [asyncio.create_task(self._client(number)) for number in range(self.clients)]
        try:
            yield
            self._going.clear()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def more(self, count: int, seconds: float = _TEXT_SECONDS) -> None:
        """Wait until so many more texts have ended, however."""
        goal = self._ended + count
        async with asyncio.timeout(seconds):
            while self._ended < goal:  # noqa: ASYNC110  # the clients' own progress
                await asyncio.sleep(0.01)

    @property
    def _ended(self) -> int:
        return self.outcome.texts + len(self.outcome.failed) + len(self.outcome.wrong)

    def note_fault(self) -> None:
        """From now on, measure how long each text that is under way waits for its next round."""
        self._since = time.monotonic()
        self._waits = []
        self._affected = {n for n, last in enumerate(self._last_round) if last is not None}

    async def recovery(self, seconds: float = _TEXT_SECONDS) -> float:
        """Seconds from the fault until the last text that was under way had a round more."""
        async with asyncio.timeout(seconds):
            while self._affected:  # noqa: ASYNC110  # the clients' own progress
                await asyncio.sleep(0.005)
        return max(self._waits, default=0.0)

    def _note_round(self, client: int) -> None:
        now = self._last_round[client] = time.monotonic()
        if self._since is not None and client in self._affected:
            self._affected.discard(client)
            self._waits.append(now - self._since)

    async def _client(self, client: int) -> None:
        number = client
        while self._going.is_set():
            number += self.clients
            index = number % len(_PROMPTS)
            prompt = _PROMPTS[index]
            asked = generation(prompt, max_new_tokens=self._tokens, temperature=0.0, gamma=4)
            asked.request_id = f"{client}-{number}"
            try:
                tokens, summary = await self._stream(client, asked)
            except grpc.aio.AioRpcError as error:
                sentence = f"{asked.request_id} {error.code().name}: {error.details()}"
                self.outcome.failed.append(sentence)
                await asyncio.sleep(0.05)
                continue
            finally:
                self._last_round[client] = None
                if self._since is not None:
                    self._affected.discard(client)
            if tokens == self._expected[index]:
                self.outcome.texts += 1
            else:
                self.outcome.wrong.append(f"{asked.request_id}: {tokens}")
            self.outcome.undrafted += summary.drafter_lost
            self.outcome.given_back += summary.given_back

    async def _stream(self, client: int, asked: pb.Generation) -> tuple[list[int], pb.Summary]:
        tokens: list[int] = []
        summary = pb.Summary()
        self._last_round[client] = time.monotonic()
        # Between two orchestrators that restart after each other a client may have no connection.
        call = self._stub.Generate(
            pb.GenerateRequest(generation=asked), timeout=_TEXT_SECONDS, wait_for_ready=True
        )
        try:
            async for event in call:
                self._note_round(client)
                tokens += [token.id for token in event.round.tokens]
                summary.MergeFrom(event.summary)
        except grpc.aio.AioRpcError as error:
            # Nobody here cancels: gRPC resets a call that comes between a server's last GOAWAY and
            # its end. docs/errors.md has clients ask again.
            if tokens or error.code() is not grpc.StatusCode.CANCELLED:
                raise
            self.outcome.reset += 1
            return await self._stream(client, asked)
        return tokens, summary
