"""How the load generator counts calls that are given up, late or refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.tools.load.generator import LoadGenerator
from tests.support.waiting import HANG_SECONDS

_Context = grpc.aio.ServicerContext[Any, Any]
REFUSED = pb.Generation(prompt="refused")
ENDLESS = pb.Generation(prompt="endless")


class Service(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Refuses, or writes rounds of a token until nobody wants them."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def Complete(self, request: pb.CompleteRequest, context: _Context) -> pb.CompleteResponse:
        return pb.CompleteResponse(text=request.generation.prompt, token_ids=[7, 7])

    async def Generate(
        self, request: pb.GenerateRequest, context: _Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        if request.generation == REFUSED:
            metadata = (("grpc-retry-pushback-ms", "250"),)
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.abort(code, "no place", trailing_metadata=metadata)
        try:
            while True:
                yield pb.GenerateResponse(round=pb.Round(tokens=[pb.Token(id=7)]))
                await asyncio.sleep(0.01)
        finally:
            self.ended.set()


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, str]]:
    server = grpc.aio.server()
    servicer = Service()  # type: ignore[abstract]  # the call that is asked
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield servicer, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_what_a_client_raises_at_a_message_cancels_its_call(
    service: tuple[Service, str],
) -> None:
    servicer, address = service
    seen: list[int] = []

    def wants_three(event: pb.GenerateResponse) -> None:
        seen.extend(token.id for token in event.round.tokens)
        if len(seen) == 3:
            raise KeyError

    async with LoadGenerator(address) as generator:
        with pytest.raises(KeyError):
            await generator.text(ENDLESS, seen=wants_three)
        await asyncio.wait_for(servicer.ended.wait(), HANG_SECONDS)
    assert seen == [7, 7, 7]


async def test_a_text_has_a_time_of_its_own(service: tuple[Service, str]) -> None:
    servicer, address = service
    async with LoadGenerator(address) as generator:
        text = await generator.text(ENDLESS, timeout_s=0.2)
        await asyncio.wait_for(servicer.ended.wait(), HANG_SECONDS)
    assert text.error.startswith("DEADLINE_EXCEEDED")
    assert text.retry_s is None
    assert text.tokens


async def test_a_refusal_says_when_to_come_again(service: tuple[Service, str]) -> None:
    async with LoadGenerator(service[1]) as generator:
        text = await generator.text(REFUSED)
    assert text.error == "RESOURCE_EXHAUSTED: no place"
    assert text.retry_s == 0.25


async def test_a_whole_text_comes_in_one_answer(service: tuple[Service, str]) -> None:
    async with LoadGenerator(service[1]) as generator:
        reply = await generator.whole(ENDLESS)
    assert (reply.text, list(reply.token_ids)) == ("endless", [7, 7])
