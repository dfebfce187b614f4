"""Orchestrator processes over fake services, to be killed in the middle of texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tokenizers import Tokenizer, models

from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.tools.local.process import ServiceProcess
from tests.support.processes.ports import free_port
from tests.support.processes.services import READY_SECONDS, is_serving
from tests.support.repository import ROOT
from tests.support.wire.fake_carrier import VOCAB_SIZE, FakeContext
from tests.support.wire.fakes import FakeDrafter, FakeTarget, serve_fakes

# Words of two letters, so that a stop string may begin in one and end in the next.
WORDS = {f"{chr(97 + number // 26)}{chr(97 + number % 26)}": number for number in range(VOCAB_SIZE)}


def speaking_target(rounds: list[int]) -> FakeTarget:
    """One that counts up to 50 in two letters, slowly enough to be interrupted; it notes rounds."""
    target = FakeTarget(wraps=50)
    target.tokenizer_json = Tokenizer(models.WordLevel(WORDS, unk_token="aa")).to_str().encode()

    async def pause(round_: int | None, context: FakeContext) -> None:
        if round_ is not None:
            rounds.append(round_)
        await asyncio.sleep(0.003)

    target.interfere = pause
    return target


class Front:
    """Orchestrator processes over fakes, each at an address of its own.

    Attributes:
        addresses: theirs.
        rounds: that the target after them has been asked for.
    """

    def __init__(self, places: dict[str, str], logs: Path) -> None:
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.rounds: list[int] = []
        self._places = places
        self._logs = logs
        self._running: dict[str, ServiceProcess] = {}

    def start(self, address: str) -> None:
        own = {**self._places, "LISTEN": address, "LOG_FORMAT": "json", "GAMMA": "4"}
        environment = {f"TANDEM_ORCHESTRATOR_{name}": value for name, value in own.items()}
        self._running[address] = ServiceProcess(
            "orchestrator",
            "orchestrator",
            "127.0.0.1",
            environment,
            self._logs / f"{address.replace(':', '-')}.log",
            root=ROOT,
        )

    def wait(self, address: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        process = self._running[address]
        while process.port is None or not is_serving(
            address, "tandem.orchestrator.v1.OrchestratorService"
        ):
            assert time.monotonic() < deadline, process.last_lines()
            time.sleep(0.05)

    def kill(self, address: str) -> None:
        self._running[address].kill()

    def end(self) -> None:
        for process in self._running.values():
            process.kill()


@asynccontextmanager
async def fronted(logs: Path, count: int = 1) -> AsyncIterator[Front]:
    """So many orchestrators, ready."""
    rounds: list[int] = []
    async with serve_fakes(FakeDrafter(), speaking_target(rounds)) as settings:
        places = {"DRAFTERS": settings.drafters[0], "TARGETS": settings.targets[0]}
        front = Front(places, logs)
        front.rounds = rounds
        try:
            for address in front.addresses[:count]:
                front.start(address)
            for address in front.addresses[:count]:
                await asyncio.to_thread(front.wait, address)
            yield front
        finally:
            front.end()


def ids_of(rounds: list[pb.Round]) -> list[int]:
    return [token.id for round_ in rounds for token in round_.tokens]
