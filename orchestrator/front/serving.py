"""What is served: the pair that replicas offer, with its tokenizer, and who makes its texts."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from orchestrator.front.chat_template import ChatTemplate
from orchestrator.front.encoder import PromptEncoder
from orchestrator.front.queue import QueueLimits
from orchestrator.front.texts import Texts
from orchestrator.front.validation import Validator
from orchestrator.pool.notifier import Notifier
from orchestrator.pool.pool import ReplicaPool
from orchestrator.settings import OrchestratorSettings
from orchestrator.text.codec import TextCodec
from tandem.errors import Exhausted, StartupError, TandemError, Unavailable
from tandem.peers.replicas.compatibility import Capabilities, Law
from tandem.peers.text.metrics import RequestMetrics
from tandem.peers.text.tokenizer_files import TokenizerFiles
from tandem.rpc.status import notes_of
from tandem.shaping.grammar import Grammars
from tandem.telemetry.metrics import catalog as metrics

if TYPE_CHECKING:
    from tandem.telemetry.metrics.metering import Metering

_log = structlog.get_logger(__name__)

# Between two questions for a tokenizer: a target that was busy may answer the next one.
_AGAIN_SECONDS = 1.0


class Serving:
    """Follows what the pool offers, and adopts it where it is another model.

    Attributes:
        metrics: of requests; None if they are not read.

    Args:
        settings: of the orchestrator.
        metering: its metrics; None if they are not read.
    """

    def __init__(self, settings: OrchestratorSettings, metering: Metering | None) -> None:
        self._settings = settings
        self._metering = metering
        self._pool = ReplicaPool(settings, self._renew)
        self._begun = False
        self._changed = asyncio.Event()
        self._notifier = Notifier()
        self._lost_at = -math.inf
        self._waiting = 0
        self._texts: Texts | None = None
        self.metrics = RequestMetrics(metering.instruments) if metering else None
        if metering is not None:
            for role, count in self._pool.counts.items():
                metering.instruments.watch(metrics.REPLICAS, count, role)

    @property
    def model(self) -> str:
        """The name of the target that was served last; empty before any was."""
        return self._texts.validator.capabilities.target.model if self._texts else ""

    async def become_ready(self) -> None:
        """Wait until there is a pair that fits, with its tokenizer.

        Raises:
            StartupError: the settings ask for what the first pair cannot do.
        """
        if not self._begun:
            self._begun = True
            await self._pool.begin()
        while not self.is_ready:
            await self._follow()

    async def unready(self) -> None:
        """Wait until there is no such pair; another law is taken over while the old one serves."""
        while self.is_ready:
            await self._follow()

    async def _follow(self) -> None:
        """Take over the law that the pool offers, or wait for a change if it is served already."""
        self._changed.clear()
        try:
            capabilities = self._pool.capabilities
        except Unavailable:  # the pool has said why
            await self._changed.wait()
            return
        if self._begin_with(capabilities.law):
            await self._changed.wait()
            return
        try:
            await self._adopt(capabilities)
        except StartupError as error:
            if self._texts is None:
                raise
            _log.error("the pair cannot be served as configured", reason=str(error))
            await self._changed.wait()
        except TandemError as error:
            # A target that failed here may stay SERVING: no change of it would call for a retry.
            _log.warning("no tokenizer yet", reason=str(error), notes=notes_of(error))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _AGAIN_SECONDS)

    def _begin_with(self, law: Law) -> bool:
        """Whether texts begin with a law now."""
        return self._texts is not None and self._texts.validator.capabilities.law == law

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
        try:
            capabilities = self._pool.capabilities
        except Unavailable:
            self._lost_at = time.monotonic()
            return
        if self._texts is not None:
            if self._begin_with(capabilities.law):
                self._texts.validator = replace(self._texts.validator, capabilities=capabilities)
            elif not self.is_ready:  # until the tokenizer has been read
                self._lost_at = time.monotonic()
        self._notifier.notify()

    async def _adopt(self, capabilities: Capabilities) -> None:
        """Serve a model that was not served before."""
        settings, known = self._settings, list(capabilities.rules)
        if settings.verifier not in known:
            raise StartupError(
                f"TANDEM_ORCHESTRATOR_VERIFIER: {settings.verifier!r} is unknown to the target or"
                f" does not suit the drafter; use one of {known}"
            )
        longest = capabilities.largest.gamma
        gamma = None if settings.gamma == "auto" else settings.gamma
        if gamma is not None and 0 < longest < gamma:
            raise StartupError(
                f"TANDEM_ORCHESTRATOR_GAMMA: {gamma} is beyond the pair's longest draft"
                f" of {longest}; lower it, or raise MAX_GAMMA of drafter and target"
            )
        tokenizer = await self._pool.tokenizer(settings.connect_seconds)
        # Parsing a large vocabulary takes a second.
        codec = await asyncio.to_thread(TextCodec, tokenizer.tokenizer_json)
        most = codec.longest_token * capabilities.target.max_length
        chat = await asyncio.to_thread(_chat_of, tokenizer, most)
        limits = QueueLimits(settings.max_encoding_waiting, settings.queue_seconds)
        encoder = PromptEncoder(codec, settings.max_encoding, limits)
        validator = Validator(
            capabilities=capabilities,
            verifier=settings.verifier,
            gamma=gamma,
            nodes=None if settings.nodes == "auto" else settings.nodes,
            max_new_tokens=settings.max_new_tokens,
            codec=codec,
            encoder=encoder,
            grammars=Grammars(
                lambda: tokenizer.tokenizer_json,
                capabilities.target.vocab_size,
                capabilities.target.eos_token_ids,
            ),
            chat=chat,
            scoped_by_caller=settings.cache_scope == "caller",
        )
        if self._texts is None:
            self._texts = Texts(settings, self._pool, validator, self.metrics)
            self._watch(self._texts)
        else:
            # The old one's prompts that are being encoded end by the law that they began with.
            self._texts.validator = validator
        self._renew()  # what is offered may have changed meanwhile

    def _watch(self, texts: Texts) -> None:
        if self._metering is not None:
            watch, role = self._metering.instruments.watch, metrics.ORCHESTRATOR
            watch(metrics.REQUESTS_ACTIVE, lambda: texts.active)
            watch(
                metrics.QUEUE_DEPTH,
                lambda: texts.validator.encoder.waiting + texts.queue.waiting,
                role,
            )

    @property
    def texts(self) -> Texts:
        """Who makes texts: with the law of the pool, or with the one before while the tokenizer of
        another is being read.

        Raises:
            Unavailable: the pair is not ready.
        """
        law, texts = self._pool.capabilities.law, self._texts
        if texts is not None and (
            self._begin_with(law) or self._pool.targets(texts.validator.capabilities)
        ):
            return texts
        raise Unavailable("not ready: reading the target's tokenizer")

    async def texts_soon(self, remaining: float | None) -> Texts:
        """Who makes texts, waited for where there was somebody a moment ago.

        Args:
            remaining: seconds until the caller's deadline; None for none.

        Raises:
            Unavailable: the pair is not ready, or not in time.
            Exhausted: as many wait already as texts may be made.
        """
        seconds = self._settings.failover_seconds - (time.monotonic() - self._lost_at)
        if remaining is not None:
            seconds = min(seconds, remaining)
        if self.is_ready or seconds <= 0:
            return self.texts
        if self._waiting >= self._settings.max_requests:
            raise Exhausted(
                f"{self._waiting} texts wait for a target; try again later", retry_seconds=1.0
            )
        self._waiting += 1
        try:
            await self._notifier.wait_for(lambda: self.is_ready or None, seconds)
        finally:
            self._waiting -= 1
        return self.texts

    async def stop(self) -> None:
        """Close the channels."""
        if self._texts is not None:
            self._texts.validator.encoder.close()
        await self._pool.close()


def _chat_of(tokenizer: TokenizerFiles, most: int) -> ChatTemplate | None:
    """A target's chat template; None if it has none, or one that cannot be read."""
    if not tokenizer.chat_template:
        return None
    try:
        return ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens, most)
    except StartupError as error:
        _log.warning("the target's chats cannot be served", reason=str(error))
        return None
