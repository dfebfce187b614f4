"""TargetService: the public side of a target, streams of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from tandem.errors import NotFound
from tandem.inference.model import Model
from tandem.rpc.channel import age_of
from tandem.rpc.server import GrpcService, Service
from tandem.rpc.status import status_boundary
from tandem.rpc.streams.server import Streams
from tandem.serving.loaded import LoadedService, passes_of
from tandem.serving.model import engine_over, info_of
from tandem.serving.prefix_cache import prefix_cache_service
from tandem.serving.servicer import EngineServicer, stream_limits
from tandem.settings import MIB
from tandem.target.v1 import target_pb2, target_pb2_grpc
from tandem.telemetry.metrics import catalog as metrics
from target_svc.drafts import OwnDrafts
from target_svc.loading import (
    check_overlap,
    kept_for_views,
    load_target,
    overlap_of,
    own_drafts,
    own_recipe,
    share_of_target,
    views_of,
)
from target_svc.messages import verifier_infos
from target_svc.overlap import Overlap
from target_svc.rules import Rules, rules_with
from target_svc.sequence import VerifiedSequence
from target_svc.settings import TargetSettings

if TYPE_CHECKING:
    from tandem.telemetry.metrics.instruments import Instruments

_Context = grpc.aio.ServicerContext[target_pb2.VerifyRequest, target_pb2.VerifyResponse]


@dataclass(frozen=True)
class LoadedTarget(LoadedService):
    """A target with its model.

    Attributes:
        decoder: scores.
        drafts: that it makes itself; None where it makes none.
        overlap: of its layers in rounds without a draft; None for whole passes.
        rules: that it offers, by name.
    """

    decoder: Model
    drafts: OwnDrafts | None
    overlap: Overlap | None
    rules: Rules

    @property
    def drafts_inside(self) -> bool:
        """Whether it makes any."""
        return self.drafts is not None

    def meter(self, instruments: Instruments) -> None:
        """See `LoadedService`."""
        counters = {
            right: instruments.counter(metrics.OVERLAP_ROUNDS, metrics.TARGET, name)
            for right, name in metrics.GUESSES.items()
        }

        def count(right: bool) -> None:
            counters[right].value += 1

        if self.overlap is not None:
            self.overlap.on_guess = count

    def described_drafts(self) -> target_pb2.TargetDrafts | None:
        """What the handshake says of its drafts, now; None where it makes none."""
        if self.drafts is None:
            return None
        info = target_pb2.TargetDrafts()
        info.CopyFrom(self.drafts.info)
        for model in self.models[1:2]:
            info.pass_times.extend(passes_of(model))
        return info


class TargetServicer(
    EngineServicer[TargetSettings, LoadedTarget], target_pb2_grpc.TargetServiceServicer
):
    """Serves a target, once its model is loaded."""

    def __init__(self, settings: TargetSettings) -> None:
        streams: Streams[target_pb2.SequenceRequest, target_pb2.SequenceResponse] = Streams(
            "verify",
            stream_limits(settings),
            target_pb2.VerifyResponse,
            target_pb2.SequenceResponse,
        )
        super().__init__(settings, "target", streams)

    def _load(self) -> LoadedTarget:
        settings = self.settings
        # What is wrong with these is said before a model is loaded.
        check_overlap(settings)
        recipe = own_recipe(settings)
        rules = rules_with(settings.verifiers)
        share = share_of_target(recipe, settings)
        alone = settings.model_copy(update={"memory_share": share})
        kept = kept_for_views(recipe, settings)
        decoder = load_target(alone, views_of(recipe, settings), kept)
        info = info_of(decoder, settings, decoder.dtype)
        info.max_nodes = settings.max_nodes if decoder.takes_trees else 0
        drafts: OwnDrafts | None = None
        models: list[Model] = [decoder]
        if recipe is not None:
            drafts, drafting = own_drafts(*recipe, settings, info, decoder)
            models += drafting
        overlap = overlap_of(settings, decoder)
        info.cache_tokens = min(model.positions for model in models if model.positions)
        engine = engine_over(models, settings, "target-engine")
        return LoadedTarget(engine, info, models, decoder, drafts, overlap, rules)

    async def Verify(self, request_iterator: object, context: _Context) -> None:  # type: ignore[override]
        """See target.proto."""
        async with status_boundary(context):
            loaded = self.loaded
            most = self.settings.max_rounds
            await self.streams.run(
                context,
                lambda: VerifiedSequence(
                    engine=loaded.engine,
                    scorer=loaded.decoder,
                    info=loaded.info,
                    max_rounds=most,
                    grammars=loaded.grammars,
                    drafts=loaded.drafts,
                    overlap=loaded.overlap,
                    feedback_layers=loaded.decoder.about.of_layers,
                    probe_tokens=loaded.decoder.about.probe_tokens,
                    rules=loaded.rules,
                    shares=self.settings.prefix_cache,
                ),
            )

    async def GetModelInfo(
        self,
        request: target_pb2.GetModelInfoRequest,
        context: grpc.aio.ServicerContext[
            target_pb2.GetModelInfoRequest, target_pb2.GetModelInfoResponse
        ],
    ) -> target_pb2.GetModelInfoResponse:
        """See target.proto."""
        async with status_boundary(context):
            loaded = self.loaded
            return target_pb2.GetModelInfoResponse(
                info=loaded.described(),
                stats=loaded.stats(),
                verifiers=verifier_infos(loaded.rules),
                max_rounds=self.settings.max_rounds,
                drafts=loaded.described_drafts(),
                feedback_layers=loaded.decoder.about.of_layers,
                probe_tokens=loaded.decoder.about.probe_tokens,
            )

    async def GetTokenizer(
        self,
        request: target_pb2.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[
            target_pb2.GetTokenizerRequest, target_pb2.GetTokenizerResponse
        ],
    ) -> target_pb2.GetTokenizerResponse:
        """See target.proto."""
        async with status_boundary(context):
            about = self.loaded.decoder.about
            tokenizer_json = about.tokenizer_json()
            if not tokenizer_json:
                raise NotFound("the checkpoint has no tokenizer; send prompts as token ids")
            return target_pb2.GetTokenizerResponse(
                tokenizer_json=tokenizer_json,
                fingerprint=about.tokenizer_fingerprint,
                chat_template=about.chat_template(),
                special_tokens=about.special_tokens(),
            )


def service_of(servicer: TargetServicer) -> Service:
    """A servicer as `tandem.rpc.process` runs it."""
    target = GrpcService(
        "tandem.target.v1.TargetService",
        lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server),
        ("Verify",),
    )
    return Service(
        (target,),
        servicer.settings.max_message_mib * MIB,
        servicer.become_ready,
        servicer.stop,
        lost=servicer.lost.wait,
        drain=servicer.drain,
        metering=servicer.metering,
        connection_age=age_of(servicer.settings),
        for_administrators=(prefix_cache_service(lambda: servicer.loaded.forget_prefixes()),),
    )


def make_service(settings: TargetSettings) -> Service:
    """The target as `tandem.rpc.process` runs it."""
    return service_of(TargetServicer(settings))
