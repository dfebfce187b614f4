"""DrafterService: the public side of a drafter, streams of sequences."""

from __future__ import annotations

import grpc

from drafter_svc.administration import learning_service
from drafter_svc.loading import LoadedDrafter, load
from drafter_svc.messages import wish_to
from drafter_svc.sequence import DraftedSequence
from drafter_svc.settings import DrafterSettings
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.rpc import messages
from tandem.rpc.channel import age_of
from tandem.rpc.server import GrpcService, Service
from tandem.rpc.status import status_boundary
from tandem.rpc.streams.server import Streams
from tandem.serving.prefix_cache import prefix_cache_service
from tandem.serving.servicer import EngineServicer, stream_limits
from tandem.settings import MIB

_Context = grpc.aio.ServicerContext[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse]


class DrafterServicer(
    EngineServicer[DrafterSettings, LoadedDrafter], drafter_pb2_grpc.DrafterServiceServicer
):
    """Serves a drafting method, once it is loaded."""

    def __init__(self, settings: DrafterSettings) -> None:
        streams: Streams[drafter_pb2.SequenceRequest, drafter_pb2.SequenceResponse] = Streams(
            "draft",
            stream_limits(settings),
            drafter_pb2.DraftResponse,
            drafter_pb2.SequenceResponse,
        )
        super().__init__(settings, "drafter", streams)

    def _load(self) -> LoadedDrafter:
        return load(self.settings)

    async def Draft(self, request_iterator: object, context: _Context) -> None:  # type: ignore[override]
        """See drafter.proto."""
        async with status_boundary(context):
            loaded = self.loaded
            await self.streams.run(
                context,
                lambda: DraftedSequence(
                    loaded.engine,
                    loaded.drafter,
                    loaded.info,
                    loaded.grammars,
                    loaded.ahead,
                    shares=self.settings.prefix_cache,
                    learning=loaded.learning,
                ),
            )

    async def GetModelInfo(
        self,
        request: drafter_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[
            drafter_pb2.GetModelInfoRequest, drafter_pb2.GetModelInfoResponse
        ],
    ) -> drafter_pb2.GetModelInfoResponse:
        """See drafter.proto."""
        async with status_boundary(context):
            loaded, traits = self.loaded, self.loaded.drafter.traits
            reply = drafter_pb2.GetModelInfoResponse(
                info=loaded.described(),
                stats=loaded.stats(),
                drafter=loaded.method,
                draft_support=self.settings.draft_support,
                shape=messages.shape_to(traits.shape),
                pure=traits.pure,
                recipe=loaded.recipe,
                ahead=loaded.ahead.nodes,
                learns=loaded.learning is not None,
            )
            wish_to(traits.feedback, reply)
            return reply


def service_of(servicer: DrafterServicer) -> Service:
    """A servicer as `tandem.rpc.process` runs it."""
    drafter = GrpcService(
        "tandem.drafter.v1.DrafterService",
        lambda server: drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server),
        ("Draft",),
    )
    return Service(
        (drafter,),
        servicer.settings.max_message_mib * MIB,
        servicer.become_ready,
        servicer.stop,
        lost=servicer.lost.wait,
        drain=servicer.drain,
        metering=servicer.metering,
        connection_age=age_of(servicer.settings),
        for_administrators=(
            prefix_cache_service(lambda: servicer.loaded.forget_prefixes()),
            learning_service(lambda: servicer.loaded.learning),
        ),
    )


def make_service(settings: DrafterSettings) -> Service:
    """The drafter as `tandem.rpc.process` runs it."""
    return service_of(DrafterServicer(settings))
