"""A service over an engine: load it in the background, run it, say what it is."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tandem.common.v1 import common_pb2
from tandem.engine.admission import AdmissionLimits
from tandem.engine.engine import Engine
from tandem.errors import Unavailable
from tandem.serving.background import in_daemon_thread
from tandem.settings import ModelSettings

M = TypeVar("M", bound=ModelSettings)
L = TypeVar("L", bound="Loaded")


@dataclass(frozen=True)
class Loaded:
    """What a service is, once it is ready.

    Attributes:
        engine: runs the sequences.
        info: the handshake's message.
        work: passes and positions computed so far.
    """

    engine: Engine
    info: common_pb2.ModelInfo
    work: Callable[[], tuple[int, int]]

    def stats(self) -> common_pb2.EngineStats:
        """The work done since the start."""
        passes, tokens = self.work()
        return common_pb2.EngineStats(
            open_sequences=self.engine.admission.open_sequences,
            forward_passes=passes,
            fed_tokens=tokens,
            opened_sequences=self.engine.admission.opened,
        )


class EngineServicer(ABC, Generic[M, L]):
    """Serves an engine, once it is loaded.

    Attributes:
        lost: set when the device answers no more.

    Args:
        settings: of the service.
        role: its name in sentences.
    """

    def __init__(self, settings: M, role: str) -> None:
        self.settings = settings
        self._role = role
        self._loaded: L | None = None
        self.lost = asyncio.Event()

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
        self._loaded.engine.start()

    @abstractmethod
    def _load(self) -> L:
        """Whatever takes long. Not on the event loop."""

    async def stop(self) -> None:
        """Stop the engine."""
        if self._loaded is not None:
            await asyncio.to_thread(self._loaded.engine.stop)


def admission_limits(settings: ModelSettings) -> AdmissionLimits:
    """Bounds on what is open and what waits."""
    return AdmissionLimits(settings.max_sequences, settings.max_waiting, settings.admission_seconds)
