"""A service over an engine: load it in the background, run it, say what it is."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from tandem.engine.admission import AdmissionLimits
from tandem.errors import Unavailable
from tandem.rpc.streams.server import StreamLimits, Streams
from tandem.serving.background import in_daemon_thread
from tandem.serving.loaded import LoadedService
from tandem.settings import ModelSettings
from tandem.telemetry.metrics.readers import metering_of

M = TypeVar("M", bound=ModelSettings)
L = TypeVar("L", bound="LoadedService")


class EngineServicer(ABC, Generic[M, L]):
    """Serves an engine, once it is loaded.

    Attributes:
        streams: that carry its sequences.
        lost: set when the engine has lost its device or failed.
        metering: its metrics; None if they are not read.

    Args:
        settings: of the service.
        role: its name in sentences.
        streams: of its sequences.
    """

    def __init__(self, settings: M, role: str, streams: Streams[Any, Any]) -> None:
        self.settings = settings
        self._role = role
        self.streams = streams
        self._loaded: L | None = None
        self._improving: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()
        self.metering = metering_of(role, settings.metrics_listen)

    @property
    def loaded(self) -> L:
        """What is served.

        Raises:
            Unavailable: it is not loaded yet.
        """
        if self._loaded is None:
            raise Unavailable(f"the {self._role} is loading its model; wait until it is SERVING")
        return self._loaded

    async def become_ready(self) -> None:
        """Load, and start the engine."""
        loaded = await in_daemon_thread(self._load)
        loaded.info.incarnation = secrets.randbits(64) or 1  # 0 names none
        self._loaded = loaded
        self._loaded.engine.on_device_lost = self.lost.set
        self._loaded.engine.admission.make_room = self.streams.make_room
        if self.metering is not None:
            from tandem.serving.meter import EngineMeter

            EngineMeter(self.metering.instruments, self._loaded)
        self._loaded.engine.start()
        if self._loaded.models:
            self._improving = asyncio.create_task(in_daemon_thread(self._loaded.improve))

    @abstractmethod
    def _load(self) -> L:
        """Whatever takes long. Not on the event loop."""

    def drain(self) -> None:
        """Take no more sequences; those that are open go on."""
        self.streams.drain()

    async def stop(self) -> None:
        """Stop the engine, and close what was loaded."""
        if self._improving is not None:
            self._improving.cancel()  # it is not waited for; its thread ends with the process
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.engine.stop)
            await asyncio.to_thread(self._loaded.close)


def admission_limits(settings: ModelSettings) -> AdmissionLimits:
    """Bounds on what is open and what waits."""
    return AdmissionLimits(
        settings.max_sequences,
        settings.max_waiting,
        settings.admission_seconds,
        settings.overcommit,
    )


def stream_limits(settings: ModelSettings) -> StreamLimits:
    """Bounds on streams, and on what is silent on them."""
    return StreamLimits(
        settings.idle_seconds,
        settings.full_idle_seconds,
        settings.empty_seconds,
        settings.max_empty_streams,
    )
