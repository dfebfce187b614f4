"""OrchestratorService: the public calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from orchestrator.front import grpc_messages as messages
from orchestrator.front.client import ReadingClient
from orchestrator.front.serving import Serving
from orchestrator.front.tokens import tokens_of
from orchestrator.settings import OrchestratorSettings
from orchestrator.text.record import TextRecord
from orchestrator.text.values import Summary
from tandem.errors import Exhausted, IdleTimeout, TandemError
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import age_of
from tandem.rpc.security.access import caller
from tandem.rpc.server import GrpcService, Service
from tandem.rpc.status import status_boundary
from tandem.settings import MIB
from tandem.telemetry.metrics import catalog as metrics
from tandem.telemetry.metrics.readers import metering_of

_Context = grpc.aio.ServicerContext[Any, Any]


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves texts over a pool of drafters and targets.

    Attributes:
        metering: its metrics; None where nobody reads them.
        serving: what is served.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._settings = settings
        self.metering = metering_of(metrics.ORCHESTRATOR, settings.metrics_listen)
        self.serving = Serving(settings, self.metering)
        self._calls = 0
        self._clients: set[ReadingClient] = set()  # of texts that are made, or waited for
        self._changed = asyncio.Event()

    async def Generate(  # type: ignore[override]  # writes to the context, as grpc.aio allows
        self, request: pb.GenerateRequest, context: _Context
    ) -> None:
        """See orchestrator.proto."""
        settings = self._settings
        client = ReadingClient(
            self._client(context), settings.idle_seconds, settings.reading_seconds
        )
        async with (
            status_boundary(context),
            self._serving(client),
            aclosing(await self._events(request, context, client)) as events,
        ):
            try:
                async for event in events:
                    if isinstance(event, Summary):
                        reply = pb.GenerateResponse(summary=messages.summary_to(event))
                    else:
                        reply = pb.GenerateResponse(round=messages.round_to(event))
                    try:
                        await client.take(context.write(reply))
                    except IdleTimeout as late:
                        # Into the text, so that its span and its log say why it ended.
                        await events.athrow(late)
            finally:
                client.close()

    async def Complete(self, request: pb.CompleteRequest, context: _Context) -> pb.CompleteResponse:
        """See orchestrator.proto."""
        reply = pb.CompleteResponse()
        texts: list[str] = []
        client = ReadingClient(self._client(context))
        async with (
            status_boundary(context),
            self._serving(client),
            aclosing(await self._events(request, context, client)) as events,
        ):
            async for event in events:
                if isinstance(event, Summary):
                    reply.summary.CopyFrom(messages.summary_to(event))
                    continue
                round_ = messages.round_to(event)
                texts.extend(token.text for token in round_.tokens)
                reply.token_ids.extend(token.id for token in round_.tokens)
                reply.origins.extend(token.origin for token in round_.tokens)
        reply.text = "".join(texts)
        return reply

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: _Context
    ) -> pb.GetModelInfoResponse:
        """See orchestrator.proto."""
        async with status_boundary(context):
            texts = self.serving.texts
            reply = messages.info_to(texts.validator)
            reply.active_requests = texts.active
        return reply

    @asynccontextmanager
    async def _serving(self, client: ReadingClient) -> AsyncIterator[None]:
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
        while self._clients:
            self._changed.clear()
            await self._changed.wait()
        await asyncio.sleep(seconds)  # for the end of a text to reach its client

    def _client(self, context: _Context) -> str:
        """Whose a call is: by what was proved, else by what a proxy says."""
        known = caller()
        return known.name if known else _metadata(context).get(self._settings.client_header, "")

    async def _events(
        self,
        request: pb.GenerateRequest | pb.CompleteRequest,
        context: _Context,
        client: ReadingClient,
    ) -> Any:
        """The text that a call asks for."""
        try:
            self._count(context)
            asked = messages.request_from(request.generation)
            texts = await self.serving.texts_soon(context.time_remaining())
        except TandemError as error:
            refused = TextRecord(metrics=self.serving.metrics, model=self.serving.model)
            refused.fail(error)
            refused.end()
            raise
        return texts.generate(asked, context.time_remaining(), _metadata(context), client)

    def _count(self, context: _Context) -> None:
        """Count a call until it is over: behind its text, where its client does not read the end.

        Raises:
            Exhausted: there are too many.
        """
        limit = self._settings.max_requests
        if self._calls >= limit:
            raise Exhausted(
                f"all {limit} places are taken; try again later, with backoff", retry_seconds=1.0
            )

        def over(_: _Context) -> None:
            self._calls -= 1

        self._calls += 1
        context.add_done_callback(over)  # type: ignore[arg-type]  # typed as what has no call


def _metadata(context: _Context) -> dict[str, str]:
    return {str(key): str(value) for key, value in context.invocation_metadata() or ()}


def make_service(settings: OrchestratorSettings) -> Service:
    """The orchestrator as `tandem.rpc.process` runs it."""
    tokens = tokens_of(settings)
    servicer = OrchestratorServicer(settings)
    orchestrator = GrpcService(
        "tandem.orchestrator.v1.OrchestratorService",
        lambda server: orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(
            servicer, server
        ),
        ("Generate", "Complete"),
    )
    return Service(
        (orchestrator,),
        settings.max_message_mib * MIB,
        servicer.serving.become_ready,
        servicer.serving.stop,
        drained=servicer.drained,
        unready=servicer.serving.unready,
        connection_age=age_of(settings),
        metering=servicer.metering,
        tokens=tokens,
    )
