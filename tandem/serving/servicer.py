"""A service over an engine: load it in the background, run it, say what it is."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tandem.common.v1 import common_pb2
from tandem.engine.admission import AdmissionLimits
from tandem.engine.engine import Engine
from tandem.errors import Unavailable
from tandem.serving.background import in_daemon_thread
from tandem.settings import ModelSettings
from tandem.telemetry.readers import metering_of

if TYPE_CHECKING:
    from tandem.inference.extents import Extents

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
        model: that scores, if one does.
    """

    engine: Engine
    info: common_pb2.ModelInfo
    model: Model | None

    def described(self) -> common_pb2.ModelInfo:
        """The handshake's message, now."""
        info = common_pb2.ModelInfo()
        info.CopyFrom(self.info)
        if self.model is not None:
            info.dtype, info.engine = self.model.dtype, self.model.engine
            info.improving = self.model.improving
        return info

    def stats(self) -> common_pb2.EngineStats:
        """The work done since the start."""
        model = self.model
        return common_pb2.EngineStats(
            open_sequences=self.engine.admission.open_sequences,
            forward_passes=model.forward_passes if model else 0,
            fed_tokens=model.fed_tokens if model else 0,
            opened_sequences=self.engine.admission.opened,
        )


class EngineServicer(ABC, Generic[M, L]):
    """Serves an engine, once it is loaded.

    Attributes:
        lost: set when the device answers no more.
        metering: its metrics; None where nobody reads them.

    Args:
        settings: of the service.
        role: its name in sentences.
    """

    def __init__(self, settings: M, role: str) -> None:
        self.settings = settings
        self._role = role
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
        self._loaded = await in_daemon_thread(self._load)
        self._loaded.engine.on_device_lost = self.lost.set
        if self.metering is not None:
            from tandem.serving.meter import EngineMeter

            EngineMeter(self.metering.instruments, self._loaded)
        self._loaded.engine.start()
        if (model := self._loaded.model) is not None:
            self._improving = asyncio.create_task(in_daemon_thread(model.improve))

    @abstractmethod
    def _load(self) -> L:
        """Whatever takes long. Not on the event loop."""

    async def stop(self) -> None:
        """Stop the engine."""
        if self._improving is not None:
            self._improving.cancel()  # nobody waits for it; its thread ends with the process
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.engine.stop)


def admission_limits(settings: ModelSettings) -> AdmissionLimits:
    """Bounds on what is open and what waits."""
    return AdmissionLimits(settings.max_sequences, settings.max_waiting, settings.admission_seconds)
