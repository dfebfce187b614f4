"""OrchestratorService: the public calls."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import grpc
import structlog

from orchestrator import messages
from orchestrator.encoder import PromptEncoder
from orchestrator.ledger import Ledger
from orchestrator.meter import Meters, TextMeter
from orchestrator.offer import Offer
from orchestrator.pool import Pool
from orchestrator.settings import OrchestratorSettings
from orchestrator.summary import Summary
from orchestrator.terms import Terms
from orchestrator.text import TextCodec
from orchestrator.texts import Texts
from tandem.errors import IdleTimeout, StartupError, TandemError, Unavailable
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.channel import ConnectionAge
from tandem.rpc.named_file import NamedFile
from tandem.rpc.patience import Patience
from tandem.rpc.server import Service
from tandem.rpc.status import notes_of, status_boundary
from tandem.rpc.tokens import Tokens
from tandem.settings import MIB, variable_of
from tandem.telemetry import metrics
from tandem.telemetry.readers import metering_of

_log = structlog.get_logger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]

# Between two questions for a tokenizer: a target that was busy may answer the next one.
_AGAIN_SECONDS = 1.0


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves texts over a pool of drafters and targets.

    Attributes:
        metering: its metrics; None where nobody reads them.
    """

    def __init__(self, settings: OrchestratorSettings) -> None:
        self._settings = settings
        self._pool = Pool(settings, self._renew)
        self._begun = False
        self._changed = asyncio.Event()
        self._texts: Texts | None = None
        self.metering = metering_of(metrics.ORCHESTRATOR, settings.metrics_listen)
        self._meters = Meters(self.metering.instruments) if self.metering else None
        if self.metering is not None:
            for role, count in self._pool.counts.items():
                self.metering.instruments.watch(metrics.REPLICAS, count, role)

    async def become_ready(self) -> None:
        """Wait until there is a pair that fits, with its tokenizer.

        Raises:
            StartupError: the settings ask for what the first pair cannot do.
        """
        if not self._begun:
            self._begun = True
            await self._pool.begin()
        while not self.is_ready:
            self._changed.clear()
            try:
                offer = self._pool.offer
            except Unavailable:  # the pool has said why
                await self._changed.wait()
                continue
            try:
                await self._adopt(offer)
            except StartupError as error:
                if self._texts is None:
                    raise
                _log.error("the pair cannot be served as configured", reason=str(error))
                await self._changed.wait()
            except TandemError as error:
                # Who failed may serve all the same, so that no news of it need ever come.
                _log.warning("no tokenizer yet", reason=str(error), notes=notes_of(error))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), _AGAIN_SECONDS)

    async def unready(self) -> None:
        """Wait until there is no such pair."""
        while self.is_ready:
            self._changed.clear()
            await self._changed.wait()

    @property
    def is_ready(self) -> bool:
        """Whether a text could be begun."""
        try:
            return self.texts is not None
        except Unavailable:
            return False

    def _renew(self) -> None:
        """Keep to what the pool offers, as long as it is the same model."""
        self._changed.set()
        texts = self._texts
        try:
            offer = self._pool.offer
        except Unavailable:
            return
        if texts is not None and texts.terms.offer.law == offer.law:
            texts.terms = replace(texts.terms, offer=offer)

    async def _adopt(self, offer: Offer) -> None:
        """Serve a model that was not served before."""
        settings, known = self._settings, list(offer.rules)
        if settings.verifier not in known:
            raise StartupError(
                f"TANDEM_ORCHESTRATOR_VERIFIER: {settings.verifier!r} is unknown to the target or"
                f" does not suit the drafter; use one of {known}"
            )
        longest = offer.max_gamma
        gamma = None if settings.gamma == "auto" else settings.gamma
        if gamma is not None and 0 < longest < gamma:
            raise StartupError(
                f"TANDEM_ORCHESTRATOR_GAMMA: {gamma} is beyond the pair's longest draft"
                f" of {longest}; lower it, or raise MAX_GAMMA of drafter and target"
            )
        tokenizer = await self._pool.tokenizer_json(settings.connect_seconds)
        # Parsing a large vocabulary takes a second.
        codec = await asyncio.to_thread(TextCodec, tokenizer)
        encoder = PromptEncoder(codec, settings.max_encoding, settings.max_encoding_waiting)
        terms = Terms(
            offer,
            settings.verifier,
            gamma,
            None if settings.nodes == "auto" else settings.nodes,
            settings.max_new_tokens,
            codec,
            encoder,
        )
        if self._texts is None:
            self._texts = Texts(settings, self._pool, terms, self._meters)
            self._watch(self._texts)
        else:
            self._texts.terms.encoder.close()
            self._texts.terms = terms
        self._renew()  # the offer may have changed meanwhile

    def _watch(self, texts: Texts) -> None:
        if self.metering is not None:
            watch, role = self.metering.instruments.watch, metrics.ORCHESTRATOR
            watch(metrics.REQUESTS_ACTIVE, lambda: texts.active)
            watch(metrics.QUEUE_DEPTH, lambda: texts.terms.encoder.waiting, role)

    @property
    def texts(self) -> Texts:
        """Who makes texts.

        Raises:
            Unavailable: the pair is not ready.
        """
        offer = self._pool.offer
        if self._texts is None or self._texts.terms.offer.law != offer.law:
            raise Unavailable("not ready: reading the target's tokenizer")
        return self._texts

    async def stop(self) -> None:
        """Close the channels."""
        if self._texts is not None:
            self._texts.terms.encoder.close()
        await self._pool.close()

    async def Generate(  # type: ignore[override]  # writes to the context, as grpc.aio allows
        self, request: pb.GenerateRequest, context: _Context
    ) -> None:
        """See orchestrator.proto."""
        patience, seconds = Patience(), self._settings.idle_seconds
        async with status_boundary(context), aclosing(self._events(request, context)) as events:
            try:
                async for event in events:
                    if isinstance(event, Summary):
                        reply = pb.GenerateResponse(summary=messages.summary_to(event))
                    else:
                        reply = pb.GenerateResponse(round=messages.round_to(event))
                    try:
                        await patience.bound(context.write(reply), seconds)
                    except TimeoutError:
                        sentence = f"the client read nothing for {seconds:g} s"
                        # Into the text, so that its span and its log say why it ended.
                        await events.athrow(IdleTimeout(f"{sentence}; resume behind what it has"))
            finally:
                patience.close()

    async def Complete(self, request: pb.CompleteRequest, context: _Context) -> pb.CompleteResponse:
        """See orchestrator.proto."""
        reply = pb.CompleteResponse()
        texts: list[str] = []
        async with status_boundary(context), aclosing(self._events(request, context)) as events:
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
            texts = self.texts
            reply = messages.info_to(texts.terms)
            reply.active_requests = texts.active
        return reply

    def _events(self, request: pb.GenerateRequest | pb.CompleteRequest, context: _Context) -> Any:
        """The text that a call asks for."""
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        try:
            texts, asked = self.texts, messages.request_from(request.generation)
        except TandemError as error:
            model = self._texts.terms.offer.target.model if self._texts else ""
            meter = TextMeter(self._meters, Ledger(), model)
            meter.fail(error)
            meter.end(None)
            raise
        return texts.generate(asked, context.time_remaining(), metadata)


def make_service(settings: OrchestratorSettings) -> Service:
    """The orchestrator as `tandem.rpc.server` runs it."""
    file = settings.token_file
    name = variable_of(OrchestratorSettings, "token_file")
    tokens = None if file is None else Tokens(NamedFile(name, file))
    servicer = OrchestratorServicer(settings)
    age = ConnectionAge(settings.connection_seconds, settings.connection_grace_seconds)
    return Service(
        "tandem.orchestrator.v1.OrchestratorService",
        lambda server: orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(
            servicer, server
        ),
        ("Generate", "Complete"),
        settings.max_message_mib * MIB,
        servicer.become_ready,
        servicer.stop,
        unready=servicer.unready,
        connection_age=age if age.seconds else None,
        metering=servicer.metering,
        tokens=tokens,
    )
