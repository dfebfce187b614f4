"""A drafter and a target that run in another thread, and the caller's end of their streams."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc

from drafter_svc.servicer import DrafterServicer
from drafter_svc.servicer import service_of as drafter_of
from drafter_svc.settings import DrafterSettings
from tandem.common.v1.common_pb2 import Draft, SequenceEnd
from tandem.drafter.v1 import drafter_pb2, drafter_pb2_grpc
from tandem.serving.servicer import EngineServicer
from tandem.target.v1 import target_pb2, target_pb2_grpc
from target_svc.servicer import TargetServicer
from target_svc.servicer import service_of as target_of
from target_svc.settings import TargetSettings
from tests.fuzz import seeds
from tests.fuzz.read.sequences import said
from tests.service.conftest import address_of, connect, start
from tests.support.models.tiny import save_random_llama

# Of each service; one more waits for so long.
PLACES, _WAIT_SECONDS = 6, 1.0
_SECONDS = 60.0
# Rounds of the sequences whose answers are known.
HONEST_ROUNDS = 5
# A walk knows who is open: nobody gives way to who waits.
_NEVER_SECONDS = 3600.0
ROLES = ("drafter", "target")
T = TypeVar("T")


class Services:
    """A drafter and a target, on an event loop of a thread of their own.

    Attributes:
        alone: what an honest sequence of each is answered, round by round, when nobody else is.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._stack = AsyncExitStack()
        self.servicers: dict[str, EngineServicer[Any, Any]] = {}
        self._stubs: dict[str, Any] = {}
        self.do(self._start())
        self.alone = {role: self._told_alone(role) for role in ROLES}

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the services' loop, and wait for it; it takes long only if it hangs."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_SECONDS)

    async def _start(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        small: dict[str, Any] = {
            "max_sequences": PLACES,
            "max_length": seeds.MAX_LENGTH,
            "max_gamma": seeds.MAX_GAMMA,
            "admission_seconds": _WAIT_SECONDS,
            "full_idle_seconds": _NEVER_SECONDS,
        }
        models = {role: save_random_llama(folder / role, 1 + i) for i, role in enumerate(ROLES)}
        drafter = DrafterServicer(DrafterSettings(model=str(models["drafter"]), **small))
        chosen = TargetSettings(model=str(models["target"]), max_rounds=seeds.MAX_ROUNDS, **small)
        target = TargetServicer(chosen)
        self.servicers = {"drafter": drafter, "target": target}
        running = [
            await start(self._stack, drafter_of(drafter)),
            await start(self._stack, target_of(target)),
        ]
        for server, role, stub in zip(
            running,
            ROLES,
            (drafter_pb2_grpc.DrafterServiceStub, target_pb2_grpc.TargetServiceStub),
            strict=True,
        ):
            await server.ready()
            self._stubs[role] = stub(await connect(self._stack, address_of(server)))

    def stop(self) -> None:
        """Stop both."""
        self.do(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def stream(self, role: str) -> Stream:
        """A new stream to one of them."""

        async def begin() -> Any:
            stub = self._stubs[role]
            return stub.Draft() if role == "drafter" else stub.Verify()

        return Stream(self, role, self.do(begin()))

    def open_sequences(self, role: str) -> int:
        return int(self.servicers[role].loaded.engine.admission.open_sequences)

    def is_empty(self, role: str) -> bool:
        """Whether no place is taken, nobody waits, and all memory is free."""
        loaded = self.servicers[role].loaded
        admission = loaded.engine.admission
        pools = [model.pool for model in loaded.models]
        free = all(pool.free_positions == pool.positions for pool in pools)
        return free and not admission.open_sequences and not admission.waiting

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds of the services."""

        async def wait() -> None:
            async with asyncio.timeout(_SECONDS / 2):
                while not condition():  # noqa: ASYNC110  # it is about another thread
                    await asyncio.sleep(0.002)

        self.do(wait())

    def _told_alone(self, role: str) -> list[Any]:
        stream = self.stream(role)
        told = [stream.ask(honest(role, round_)) for round_ in range(HONEST_ROUNDS)]
        stream.cancel()
        self.until(lambda: self.is_empty(role))
        return told


@dataclass
class Sequence:
    """What a sequence should be like, as its caller knows it."""

    length: int
    round: int


@dataclass
class Stream:
    """A caller's end of a stream, and what should be there."""

    services: Services
    role: str
    call: Any
    last: int = 0
    open: dict[int, Sequence] = field(default_factory=dict)

    def ask(self, *requests: Any) -> Any:
        """The one answer to requests of one sequence, without its times."""
        kind = drafter_pb2.DraftRequest if self.role == "drafter" else target_pb2.VerifyRequest

        async def exchange() -> Any:
            await self.call.write(kind(requests=requests))
            return await self.call.read()

        reply = self.services.do(exchange())
        assert reply is not grpc.aio.EOF, "the stream ended with a sequence"
        (answer,) = reply.responses
        assert answer.sequence == requests[0].sequence
        return said(answer)

    def ask_all(self, requests: list[Any], count: int) -> list[Any]:
        """So many answers to requests of one sequence, or those up to its end."""

        async def exchange() -> list[Any]:
            await self.call.write(target_pb2.VerifyRequest(requests=requests))
            found: list[Any] = []
            while len(found) < count and not any(isinstance(one, SequenceEnd) for one in found):
                reply = await self.call.read()
                assert reply is not grpc.aio.EOF, "the stream ended with a sequence"
                found += [said(answer) for answer in reply.responses]
            return found

        return list(self.services.do(exchange()))

    def cancel(self) -> None:
        self.call.cancel()


def honest(role: str, round_: int) -> Any:
    """The requests of a sequence whose answers are known: of a drafter its tokens are given, of
    a target none is accepted, since there is no draft."""
    if role == "drafter":
        if not round_:
            return seeds.open_draft()
        return seeds.draft_step(round_, 2 + round_)
    if not round_:
        return seeds.open_verify()
    return seeds.verify_step(Draft(), round_, 3 + round_)
