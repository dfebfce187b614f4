"""A service over an engine: load it in the background, run it, say what it is."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tandem.common.v1 import common_pb2
from tandem.engine.admission import AdmissionLimits
from tandem.engine.engine import Engine
from tandem.errors import Unavailable
from tandem.rpc.streams.server import StreamLimits, Streams
from tandem.serving.background import in_daemon_thread
from tandem.settings import ModelSettings
from tandem.telemetry.readers import metering_of

if TYPE_CHECKING:
    from tandem.inference.kv.extents import Extents

M = TypeVar("M", bound=ModelSettings)
L = TypeVar("L", bound="Loaded")


class Model(Protocol):
    """What a service scores with."""

    forward_passes: int
    fed_tokens: int
    improving: bool

    @property
    def engine(self) -> str:
        """What computes its passes."""

    @property
    def dtype(self) -> str:
        """In which they are computed."""

    @property
    def pool(self) -> Extents:
        """The KV cache that new sequences get a part of."""

    def improve(self) -> None:
        """Look for something faster. Slow; from any thread."""


@dataclass(frozen=True)
class Loaded:
    """What a service is, once it is ready.

    Attributes:
        engine: runs the sequences.
        info: the handshake's message, but for what changes.
        models: that score, if any do; of several the first one is described.
    """

    engine: Engine
    info: common_pb2.ModelInfo
    models: Sequence[Model]

    def described(self) -> common_pb2.ModelInfo:
        """The handshake's message, now."""
        info = common_pb2.ModelInfo()
        info.CopyFrom(self.info)
        if self.models:
            info.dtype, info.engine = self.models[0].dtype, self.models[0].engine
            info.improving = any(model.improving for model in self.models)
        return info

    def stats(self) -> common_pb2.EngineStats:
        """The work done since the start."""
        return common_pb2.EngineStats(
            open_sequences=self.engine.admission.open_sequences,
            forward_passes=sum(model.forward_passes for model in self.models),
            fed_tokens=sum(model.fed_tokens for model in self.models),
            opened_sequences=self.engine.admission.opened,
        )

    def improve(self) -> None:
        """Look for faster models, one after the other. Slow; from any thread."""
        for model in self.models:
            model.improve()


class EngineServicer(ABC, Generic[M, L]):
    """Serves an engine, once it is loaded.

    Attributes:
        streams: that carry its sequences.
        lost: set when the device answers no more.
        metering: its metrics; None where nobody reads them.

    Args:
        settings: of the service.
        role: its name in sentences.
        streams: see there.
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
        loaded.info.incarnation = secrets.randbits(64) or 1  # 0 is nobody's
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
        """Stop the engine."""
        if self._improving is not None:
            self._improving.cancel()  # nobody waits for it; its thread ends with the process
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.engine.stop)


def admission_limits(settings: ModelSettings) -> AdmissionLimits:
    """Bounds on what is open and what waits."""
    return AdmissionLimits(settings.max_sequences, settings.max_waiting, settings.admission_seconds)


def stream_limits(settings: ModelSettings) -> StreamLimits:
    """Bounds on streams, and on what is silent on them."""
    return StreamLimits(
        settings.idle_seconds,
        settings.full_idle_seconds,
        settings.empty_seconds,
        settings.max_empty_streams,
    )
