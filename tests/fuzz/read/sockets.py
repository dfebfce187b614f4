"""Mutated bytes through sockets, to each method of each service."""

from __future__ import annotations

import asyncio
import random
import re
import resource
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tandem.drafter.v1 import drafter_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.target.v1 import target_pb2
from tests.fuzz import seeds
from tests.fuzz.mutation import mutant
from tests.fuzz.read.generations import Generations
from tests.fuzz.read.sequences import DraftSequences, VerifySequences
from tests.fuzz.read.surface import Surface, Violation
from tests.service.conftest import Stack, serving
from tests.service.streams.test_hostile import COMMON, METHODS
from tests.support.models.tiny import save_random_llama
from tests.support.repository import ROOT
from tests.support.wire.talk import code_named

_PROTOS = ROOT / "protos" / "tandem"
_SEEDS: dict[str, Sequence[Message]] = {
    "Draft": DraftSequences.seeds,
    "Verify": VerifySequences.seeds,
    "Generate": Generations.seeds,
    "Complete": [pb.CompleteRequest(generation=each) for each in seeds.GENERATIONS],
    "GetModelInfo": [pb.GetModelInfoRequest()],
    "GetTokenizer": [target_pb2.GetTokenizerRequest()],
    "Check": [health_pb2.HealthCheckRequest(service=name) for name in ("", "tandem", "x" * 99)],
    "Watch": [health_pb2.HealthCheckRequest(service="")],
    "ServerReflectionInfo": [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_by_filename="tandem/common/v1/common.proto"),
    ],
}
# A call has an end of its own; one that needs this long hangs.
_SECONDS = 30.0
# Every so many messages a whole honest text is made beside one.
_HONEST_EVERY = 16
# Of the process's memory, which has to be steady after so many messages.
_WARM, _MOST_GROWTH_KIB = 2_000, 64 << 10


def _statuses(service: str, method: str) -> set[str]:
    """What a call may end with: what the contract lists, but for what would be our own fault."""
    contract = (_PROTOS / service / "v1" / f"{service}.proto").read_text()
    comment = contract.partition(f"  rpc {method}(")[0].rpartition("\n\n")[2]
    if method == "Complete":  # "same errors"
        return _statuses(service, "Generate")
    listed = set(re.findall(r"^ *//   ([A-Z_]{5,}) ", comment, re.MULTILINE))
    listed |= {name for name in ("NOT_FOUND",) if name in comment}
    return {"OK", "INVALID_ARGUMENT"} | listed - {"INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED"}


class Sockets(Surface):
    """Every call ends in time, by a status that its contract lists; honest texts stay the same.

    Bytes are a method's name, a zero, and the message.
    """

    name = "socket"
    share = 0.008

    def __init__(self) -> None:
        self._calls = {
            method: (service, kind)
            for service, methods in METHODS.items()
            for method, kind in (methods | COMMON).items()
        }
        self._sent, self._warm_kib = 0, 0

    async def start(self) -> None:
        self._stack = AsyncExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        pair = save_random_llama(folder / "drafter", 2), save_random_llama(folder / "target", 1)
        small = {"max_length": seeds.MAX_LENGTH}
        self._services: Stack = await self._stack.enter_async_context(serving(pair, **small))
        self._alone = await self._honest()

    async def stop(self) -> None:
        try:
            await self._require_nothing_left()
        finally:
            await self._stack.aclose()

    def draw(self, source: random.Random) -> bytes:
        """Streams of sequences and texts more often than the rest."""
        methods = list(self._calls)
        large = [method for method in methods if method.rpartition("/")[2] in seeds.LARGE]
        method = source.choice(large if source.random() < 0.8 else methods)
        return method.encode() + b"\0" + mutant(source, _SEEDS[method.rpartition("/")[2]])

    async def check(self, data: bytes) -> str:
        name, _, message = data.partition(b"\0")
        method = name.decode()
        self._sent += 1
        honest = self._honest() if self._sent % _HONEST_EVERY == 0 else _nothing()
        ended, text = await asyncio.gather(self._call(data, method, message), honest)
        if text is not None and text != self._alone:
            raise Violation(data, f"an honest text became {text}")
        if self._sent == _WARM:
            self._warm_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return ended

    async def _call(self, data: bytes, method: str, message: bytes) -> str:
        service, kind = self._calls[method]
        short = method.rpartition("/")[2]
        allowed = {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}
        if "/tandem." in method:
            allowed = _statuses(service, short)
        try:
            async with asyncio.timeout(_SECONDS):
                told = await _ended(self._services.channels[service], method, kind, message)
        except TimeoutError:
            raise Violation(data, f"{short} hangs") from None
        if unlisted := {name for name in told if name not in allowed}:
            raise Violation(data, f"{short} ended with {unlisted}")
        return told[-1]

    async def _honest(self) -> list[int]:
        generation = seeds.GENERATIONS[0]
        reply = await self._services.orchestrator.Complete(
            pb.CompleteRequest(generation=generation), timeout=_SECONDS, wait_for_ready=True
        )
        return list(reply.token_ids)

    async def _require_nothing_left(self) -> None:
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._warm_kib
        if self._warm_kib and grown > _MOST_GROWTH_KIB:
            raise Violation(b"", f"memory grew by {grown} KiB in {self._sent - _WARM} messages")
        for _ in range(100):
            if not (left := await self._services.open_sequences()):
                return
            await asyncio.sleep(0.05)
        raise Violation(b"", f"{left} sequences are left")


async def _nothing() -> None:
    return None


async def _ended(channel: Any, method: str, kind: str, message: bytes) -> list[str]:
    """The statuses of a call's sequences, then its own."""
    told: list[str] = []
    call: Any
    if kind == "unary":
        call = channel.unary_unary(method)(message)
        return [(await call.code()).name]
    if kind == "server":
        call = channel.unary_stream(method)(message)
    else:
        call = channel.stream_stream(method)()
        await call.write(message)
        await call.done_writing()
    try:
        while (answer := await call.read()) is not grpc.aio.EOF:
            if method.endswith("/Watch"):  # it would go on for ever
                call.cancel()
                return ["OK"]
            told += _ends(method, answer)
    except grpc.aio.AioRpcError:
        pass
    return [*told, (await call.code()).name]


def _ends(method: str, answer: bytes) -> list[str]:
    """Statuses of sequences that an answer ends."""
    kinds: dict[str, Any] = {
        "Draft": drafter_pb2.DraftResponse,
        "Verify": target_pb2.VerifyResponse,
    }
    kind = kinds.get(method.rpartition("/")[2])
    if kind is None:
        return []
    responses = kind.FromString(answer).responses
    return [code_named(each.ended.code) for each in responses if each.HasField("ended")]
