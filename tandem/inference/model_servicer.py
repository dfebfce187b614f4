"""What the services with a model share: load it, run an engine over it, say what it is."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import structlog

from tandem.errors import StartupError, Unavailable
from tandem.inference.admission import AdmissionLimits
from tandem.inference.decoder import Decoder
from tandem.inference.engine import BatchLimits, Engine
from tandem.inference.threads import in_daemon_thread
from tandem.settings import ModelSettings

_log = structlog.get_logger(__name__)

# With 32, the slowest rounds of eight texts take 1.8 times as long beside a long prompt on a
# CPU; with 64 it is 2.8 (benchmarks/interference.py).
_CPU_CHUNK = 32
_DEVICE_CHUNK = 512
_CHUNKS_ALONE = 4

M = TypeVar("M", bound=ModelSettings)
E = TypeVar("E", bound=Engine[Any, Any])


class ModelServicer(ABC, Generic[M, E]):
    """Serves an engine, once its model is loaded.

    Attributes:
        lost: set when the device answers no more.

    Args:
        settings: of the service.
        role: its name in sentences.
    """

    def __init__(self, settings: M, role: str) -> None:
        self.settings = settings
        self._role = role
        self._engine: E | None = None
        self.lost = asyncio.Event()

    @property
    def engine(self) -> E:
        """The engine.

        Raises:
            Unavailable: the model is not loaded yet.
        """
        if self._engine is None:
            raise Unavailable(f"the {self._role} is loading its model; wait until it is SERVING")
        return self._engine

    async def become_ready(self) -> None:
        """Load the model and start the engine."""
        self._engine = await in_daemon_thread(self._load)
        self._engine.on_device_lost = self.lost.set
        self._engine.start()

    def _load(self) -> E:
        settings = self.settings
        decoder = Decoder.load(
            settings.model,
            settings.device,
            settings.dtype,
            settings.cache_tokens,
            at_most=settings.max_sequences * settings.max_length,
            threads=settings.threads,
        )
        positions, longest = decoder.pool.positions, min(decoder.max_length, settings.max_length)
        if positions < longest:
            raise StartupError(
                f"a KV cache of {positions} tokens does not hold a sequence of {longest};"
                " raise CACHE_TOKENS or lower MAX_LENGTH"
            )
        _log.info("KV cache", tokens=positions, bytes=positions * decoder.pool.bytes_per_position)
        usual = _CPU_CHUNK if decoder.device.type == "cpu" else _DEVICE_CHUNK
        chunk = settings.prefill_chunk or usual
        return self._make_engine(
            decoder,
            AdmissionLimits(
                settings.max_sequences, settings.max_waiting, settings.admission_seconds
            ),
            BatchLimits(settings.token_budget, chunk, _CHUNKS_ALONE * chunk, settings.gather),
        )

    @abstractmethod
    def _make_engine(self, decoder: Decoder, admission: AdmissionLimits, batch: BatchLimits) -> E:
        """The service's engine over a loaded model."""

    async def stop(self) -> None:
        """Stop the engine."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)

    @property
    def max_length(self) -> int:
        """Tokens a sequence may hold."""
        return min(self.engine.decoder.max_length, self.settings.max_length)
