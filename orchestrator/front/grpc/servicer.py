"""OrchestratorService: the public calls."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import grpc

from orchestrator.front.calls import OpenCalls
from orchestrator.front.client import ReadingClient
from orchestrator.front.grpc import messages
from orchestrator.front.serving import Serving
from orchestrator.settings import OrchestratorSettings
from tandem.errors import IdleTimeout
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.peers.text.values import Summary
from tandem.rpc.security.access import caller
from tandem.rpc.server import GrpcService
from tandem.rpc.status import status_boundary
from tandem.telemetry.metrics import catalog as metrics
from tandem.telemetry.metrics.readers import metering_of

_Context = grpc.aio.ServicerContext[Any, Any]


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves texts over a pool of drafters and targets.

    Attributes:
        metering: its metrics; None if they are not read.
        serving: what is served.
        calls: that are here.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._settings = settings
        self.metering = metering_of(metrics.ORCHESTRATOR, settings.metrics_listen)
        self.serving = Serving(settings, self.metering)
        self.calls = OpenCalls(settings, self.serving)

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
            self.calls.serving(client),
            aclosing(await self._events(request, context, client)) as events,
        ):
            try:
                async for event in events:
                    reply = pb.GenerateResponse()
                    if isinstance(event, Summary):
                        reply.summary.CopyFrom(messages.summary_to(event))
                    else:
                        messages.write_round(reply.round, event)
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
            self.calls.serving(client),
            aclosing(await self._events(request, context, client)) as events,
        ):
            async for event in events:
                if isinstance(event, Summary):
                    reply.summary.CopyFrom(messages.summary_to(event))
                    texts.append(event.tail)
                    continue
                round_ = messages.round_to(event)
                texts.extend(token.text for token in round_.tokens)
                reply.token_ids.extend(token.id for token in round_.tokens)
                reply.origins.extend(token.origin for token in round_.tokens)
                reply.log_probs.extend(
                    token.log_prob for token in round_.tokens if token.HasField("log_prob")
                )
                reply.prompt_log_probs.extend(round_.prompt_log_probs)
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
        with self.calls.refusals():
            self._count(context)
            asked = messages.request_from(request.generation)
            texts = await self.serving.texts_soon(context.time_remaining())
        return texts.generate(asked, context.time_remaining(), _metadata(context), client)

    def _count(self, context: _Context) -> None:
        """Count a call until it is over: after its text, where its client does not read the end.

        Raises:
            Exhausted: there are too many.
        """
        self.calls.enter()
        context.add_done_callback(lambda _: self.calls.leave())  # type: ignore[arg-type]  # typed as what has no call


def _metadata(context: _Context) -> dict[str, str]:
    return {str(key): str(value) for key, value in context.invocation_metadata() or ()}


def grpc_service(servicer: OrchestratorServicer) -> GrpcService:
    """A servicer as a server registers it."""
    return GrpcService(
        "tandem.orchestrator.v1.OrchestratorService",
        lambda server: orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(
            servicer, server
        ),
        ("Generate", "Complete"),
    )
