"""The orchestrator against fake services: the loop, lost peers, pairs that do not fit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.servicer import make_service
from orchestrator.settings import OrchestratorSettings
from tandem.drafter.v1 import drafter_pb2
from tandem.errors import StartupError
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.rpc.server import RunningServer
from tests.service.fakes import FakeDrafter, FakeTarget, serve_fakes

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def orchestrate(
    drafter: FakeDrafter, target: FakeTarget, *, ready: bool = True, **settings: Any
) -> AsyncIterator[Any]:
    servers, addresses = await serve_fakes(drafter, target)
    addressed = {"drafters": (addresses[0],), "targets": (addresses[1],)}
    server = RunningServer(
        "127.0.0.1:0", make_service(OrchestratorSettings(**(addressed | settings)))
    )
    await server.start()
    try:
        if ready:
            await server.ready()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    finally:
        await server.stop(1.0)
        for fake in servers:
            await fake.stop(0)


def request(**changes: Any) -> pb.CompleteRequest:
    fields: dict[str, Any] = {
        "prompt_token_ids": [1],
        "stopping": pb.Stopping(max_new_tokens=20),
        "speculation": pb.Speculation(gamma=4),
    }
    return pb.CompleteRequest(generation=pb.Generation(**(fields | changes)))


def expected(target: FakeTarget, count: int) -> list[int]:
    tokens = [1]
    while len(tokens) <= count:
        tokens.append(target.follow(tokens[-1]))
    return tokens[1:]


async def test_the_loop() -> None:
    drafter, target = FakeDrafter(), FakeTarget()
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(request())
        assert list(reply.token_ids) == expected(target, 20)
        # 2, then 3456+7 kept with a bonus, then rejections where the count wraps.
        assert list(reply.summary.gammas[:3]) == [0, 4, 4]
        assert reply.summary.accepted_per_position[0] >= reply.summary.accepted_per_position[-1]
    assert (drafter.ended, target.ended) == (1, 1)


async def test_a_lost_drafter_does_not_fail_the_text() -> None:
    drafter, target = FakeDrafter(), FakeTarget()

    def die(round_: int) -> None:
        if round_ == 2:
            raise RuntimeError("drafter bug")

    drafter.before_draft = die
    async with orchestrate(drafter, target) as stub:
        reply = await stub.Complete(request())
        assert list(reply.token_ids) == expected(target, 20)
        assert reply.summary.drafter_lost
        assert list(reply.summary.gammas[:4]) == [0, 4, 0, 0]
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stub.Complete(request(speculation={"verifier": "greedy_block", "gamma": 4}))
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_slow_drafter_is_given_up() -> None:
    class Hanging(FakeDrafter):
        async def Draft(self, request_iterator: Any, context: Any) -> Any:
            async for message in request_iterator:
                if message.HasField("draft"):
                    await asyncio.sleep(60)
                yield drafter_pb2.DraftResponse(opened=drafter_pb2.OpenedSequence())

    async with orchestrate(Hanging(), FakeTarget(), draft_seconds=0.2) as stub:
        reply = await stub.Complete(request())
        assert reply.summary.drafter_lost
        assert len(reply.token_ids) == 20


async def test_an_eos_ends_the_text_and_ignore_eos_does_not() -> None:
    async with orchestrate(FakeDrafter(), FakeTarget(eos_token_ids=[5, 0])) as stub:
        reply = await stub.Complete(request())
        assert list(reply.token_ids) == [2, 3, 4, 5]
        assert reply.summary.finish_reason == pb.FINISH_REASON_EOS
        going_on = {"max_new_tokens": 20, "ignore_eos": True}
        reply = await stub.Complete(request(stopping=going_on))
        assert len(reply.token_ids) == 20


@pytest.mark.parametrize(
    ("difference", "sentence"),
    [
        ({"tokenizer_fingerprint": "abc"}, "another tokenizer"),
        ({"vocab_size": 99}, "99 token ids"),
        ({"protocol_version": 2}, "protocol version 2"),
    ],
)
async def test_a_pair_that_does_not_fit_is_refused(
    difference: dict[str, Any], sentence: str
) -> None:
    async with orchestrate(FakeDrafter(**difference), FakeTarget(), ready=False) as stub:
        for _ in range(50):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Complete(request())
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            if sentence in str(refused.value.details()):
                return
            await asyncio.sleep(0.05)
        pytest.fail(str(refused.value.details()))


async def test_without_a_drafter_everything_is_plain() -> None:
    async with orchestrate(FakeDrafter(), FakeTarget(), drafters=()) as stub:
        reply = await stub.Complete(request(speculation=None))
        assert reply.summary.rounds == 20
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request())
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_default_verifier_cannot_start() -> None:
    with pytest.raises(StartupError, match="TANDEM_ORCHESTRATOR_VERIFIER"):
        async with orchestrate(FakeDrafter(), FakeTarget(), verifier="magic"):
            pass


async def test_one_text_too_many_is_refused_at_once() -> None:
    async with orchestrate(FakeDrafter(), FakeTarget(), max_requests=1) as stub:
        call = stub.Generate(
            pb.GenerateRequest(generation=request(stopping={"max_new_tokens": 900}).generation)
        )
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Complete(request())
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()


def test_it_runs_where_torch_and_transformers_are_not_installed() -> None:
    """The whole of this file's loop, in a process in which neither can be imported."""
    script = (
        "import sys, asyncio; sys.modules['torch'] = sys.modules['transformers'] = None;"
        "from tests.service import test_orchestrator as t; asyncio.run(t.test_the_loop())"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
